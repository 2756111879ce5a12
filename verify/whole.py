"""Golden and noise of a case made whole, and the target's tensors held against them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bridge.verify.bits import all_finite
from bridge.verify.case import Case
from bridge.verify.compare import Trio, judge_tensor
from bridge.verify.conditioning import analysed
from bridge.verify.envelope import Envelope, measure_noise, surer_noise
from bridge.verify.every import FAMILY as EVERY
from bridge.verify.evidence import Evidence
from bridge.verify.exact import FAMILY as EXACT
from bridge.verify.exact import exact_tensors
from bridge.verify.execute import Result, tensor_names
from bridge.verify.golden_check import checked_golden
from bridge.verify.options import Options
from bridge.verify.poisoned import poisoned_rows
from bridge.verify.spec import KernelSpec
from bridge.verify.stability import unstable_elements
from bridge.verify.verdict import Constants, TensorVerdict

#: Times over its noise budget that an element may be because its few noise draws were lucky, where more than
#: the budget speaks against the tensor.
_LUCK = 30.0


@dataclass(slots=True, kw_only=True)
class Whole:
    """One case with golden, reference and noise in full width.

    notes: what there is to say about golden.
    """

    spec: KernelSpec
    case: Case
    constants: Constants
    options: Options
    golden: Result
    reference: Result
    noise: dict[str, Envelope]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, spec: KernelSpec, case: Case, reference: Result, *, constants: Constants, options: Options
    ) -> Whole:
        """Make golden and its noise.

        Raises:
            SpecError: as `run_golden`.
        """
        golden, doubts = checked_golden(spec, case, reference)
        return cls(
            spec=spec,
            case=case,
            constants=constants,
            options=options,
            golden=golden,
            reference=reference,
            noise=measure_noise(spec, case, golden, seed=options.seed),
            notes=doubts,
        )

    def settled(self, target: Result) -> list[TensorVerdict]:
        """Every tensor; where one fails once more without golden's own ties, and with surer noise."""
        tensors = self.tensors(target)
        if any(t.verdict == "FAIL" and t.tensor not in target.faults for t in tensors):
            ties = unstable_elements(self.spec, self.case, self.golden, seed=self.options.seed)
            if any(bool(mask.any()) for mask in ties.values()):
                tensors = self.tensors(target, ties)
            if any(near_its_budget(t) for t in tensors):
                self.noise = surer_noise(
                    self.spec, self.case, self.golden, self.noise, seed=self.options.seed
                )
                tensors = self.tensors(target, ties)
        return tensors

    def tensors(self, target: Result, ties: dict[str, torch.Tensor] | None = None) -> list[TensorVerdict]:
        """Every output, gradient and differing repeat of the target."""
        spec, case = self.spec, self.case
        wanted, eager = self.golden.named(), self.reference.named()
        exact = exact_tensors(spec, case) if case.family == EXACT else frozenset()
        elementwise = spec.kind == "elementwise"
        odd = not all(all_finite(t) for t in case.inputs)
        return [
            judge_tensor(
                name,
                case.name,
                Trio(golden=wanted.get(name), reference=eager.get(name), target=result),
                constants=self.constants,
                envelope=self.noise.get(name),
                elementwise=elementwise,
                nonfinite_inputs=odd,
                unstable=(ties or {}).get(name),
                undefined=poisoned_rows(case, eager.get(name), wanted.get(name), elementwise=elementwise)
                if odd
                else None,
                fault=target.faults.get(name),
                exact=name in exact,
                demand_inf=case.family == EVERY,
                tiles=target.tiles,
            )
            for name, result in results_of(spec, self.reference, target)
        ]

    def conditioned(self, tensors: list[TensorVerdict], target: Result) -> list[TensorVerdict]:
        """Tensors without a valid gate, with what their conditioning says."""
        told = (self.golden.named(), self.reference.named(), target.named())
        return [
            analysed(self.spec, self.case, t, told, options=self.options, device=target.device)
            for t in tensors
        ]

    def evidence(self, target: Result, tensors: list[TensorVerdict]) -> Evidence | None:
        """For diagnosis."""
        return Evidence(
            case=self.case,
            golden=self.golden,
            reference=self.reference,
            target=target,
            noise=self.noise,
            tensors=tensors,
        )


def near_its_budget(tensor: TensorVerdict) -> bool:
    """Whether a tensor fails for finite values, and luck in few noise draws may explain it.

    A few draws of a difference that cancels may all be nothing: then the ratio has no bound, but nothing else
    fails.
    """
    budget = tensor.companions.get("noise budget")
    return (
        tensor.verdict == "FAIL"
        and tensor.structure is None
        and budget is not None
        and budget.value is not None
        and budget.value > 1.0
        and (budget.value <= _LUCK or all(c.passed or c is budget for c in tensor.companions.values()))
    )


def results_of(spec: KernelSpec, reference: Result, target: Result) -> list[tuple[str, torch.Tensor | None]]:
    """What is judged of a target: every tensor that it or the reference has, and repeats with other bits."""
    got, eager = target.named(), reference.named()
    found = [(n, got.get(n)) for n in tensor_names(spec) if n in got or n in eager]
    return found + [(n, t) for n, others in target.differing.items() for t in others]
