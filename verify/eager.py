"""The reference of a case in its own dtype: run whole, or for a large case with independent rows in blocks.

Torch holds up to fifteen copies of a 16-bit input while the FP32 formula of a norm runs backward. In blocks
of rows the reference takes no more than golden. What belongs to all rows (the gradient of a weight) is added
up over the blocks in FP32 where the formula does that too; where it does not (a reference in 16 bits
throughout), it comes from one run on the whole, in which no other gradient is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bridge.errors import KernelError
from bridge.verify.apart import NotApartError
from bridge.verify.blocks import Plan, plan_blocks
from bridge.verify.case import Case
from bridge.verify.every import FAMILY as EVERY
from bridge.verify.exact import FAMILY as EXACT
from bridge.verify.execute import Result, run
from bridge.verify.heap import give_back
from bridge.verify.options import Options
from bridge.verify.raised import refusal
from bridge.verify.spec import KernelSpec
from bridge.verify.structure import meta_mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """What the reference of a case gives.

    result: all of it; beside a plan, results that have rows are stand-ins with their shape, dtype and device.
    plan: how the case is cut into blocks; None where it is judged whole.
    why: why a large case is not cut.
    """

    result: Result
    plan: Plan | None = None
    why: str = ""


def is_large(case: Case, options: Options) -> bool:
    """Whether memory matters more than the time that is spent on saving it."""
    return max((t.numel() * t.element_size() for t in case.inputs), default=0) >= options.large_bytes


def tidy(case: Case, options: Options) -> None:
    """Between two steps of a large case: what the last one left goes back to the system."""
    if is_large(case, options):
        give_back()


def run_eager(spec: KernelSpec, case: Case, options: Options) -> Eager:
    """Run the reference: all of it, or of a large case what has no rows, with a plan for the rest.

    Raises:
        KernelError: it returns something else than tensors.
        Exception: what the reference raises.
    """
    if not is_large(case, options) or case.family in (EXACT, EVERY):
        return Eager(result=run_whole(spec, case))
    try:
        plan = plan_blocks(spec, case, seed=options.seed)
        tidy(case, options)
        return Eager(result=_beside_rows(spec, case, plan), plan=plan)
    except NotApartError as error:
        return Eager(result=run_whole(spec, case), why=str(error))


def run_whole(spec: KernelSpec, case: Case, *, copies: bool = True) -> Result:
    """All results of the reference.

    Args:
        copies: run it on copies of what the case holds; a reference that writes nothing there needs none.

    Raises:
        KernelError: it returns something else than tensors.
        Exception: what the reference raises.
    """
    inputs, upstream = (None, None) if copies else (case.inputs, case.grad_outputs)
    result = run(spec.reference, spec, case, inputs=inputs, grad_outputs=upstream)
    if isinstance(result, str):
        raise KernelError(f"the reference of {spec.name} {result}")
    return result


def uncut(spec: KernelSpec, case: Case, why: NotApartError) -> Eager:
    """All results of the reference, for a case that was to be judged in blocks.

    Raises:
        KernelError: the reference raised, or returns something else than tensors.
    """
    try:
        return Eager(result=run_whole(spec, case), why=str(why))
    except Exception as error:
        raise KernelError(refusal(spec, case, "reference", error)) from error


def _beside_rows(spec: KernelSpec, case: Case, plan: Plan) -> Result:
    """Stand-ins for what the blocks give, and from a run on the whole what has no rows if they do not."""
    rows = plan.rows
    outputs = {name: like for name in spec.outputs if (like := rows.like(name)) is not None}
    likes = {name: rows.like(f"grad_{name}") for name in spec.grads}
    shared = [n for n, like in likes.items() if like is not None and rows.results[f"grad_{n}"] is None]
    if plan.added or not (shared or any(rows.results[name] is None for name in outputs)):
        return Result(outputs=outputs, grads=likes)
    # Of some rows `rows_apart` has seen that it writes to none of its inputs.
    whole = run_whole(replace(spec, grads=tuple(shared)), case, copies=False)
    for name, got in whole.outputs.items():
        if (text := meta_mismatch(got, outputs[name])) is not None:
            raise NotApartError(f"{name} does not follow the number of rows: {text}")
        if rows.results[name] is None:
            outputs[name] = got
    return Result(outputs=outputs, grads=likes | whole.grads)
