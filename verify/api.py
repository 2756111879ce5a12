"""`verify_kernel`, the Python face of `bridge verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bridge.errors import UsageError
from bridge.verify import registry
from bridge.verify.request import ConstantChoice, Emit, Request
from bridge.verify.spec import KernelSpec
from bridge.verify.verdict import Verdict

if TYPE_CHECKING:
    from bridge.capture.record import Call
    from bridge.capture.store import Capture


def verify_kernel(
    spec: KernelSpec | str | Path,
    *,
    capture: Capture | Path | str | None = None,
    call: Call | str | None = None,
    op: str | None = None,
    partial: bool = False,
    target: Literal["kernel", "recorded"] = "kernel",
    sweep: bool = True,
    quick: bool = False,
    dtypes: Sequence[str] = (),
    shapes: Sequence[tuple[int, ...]] = (),
    max_calls: int = 4,
    seed: int = 0,
    fudge_factor: float | None = None,
    project_atol: float | None = None,
    max_reference_relative_error: float | None = None,
    isolate: bool = False,
    timeout: float = 300.0,
    jobs: int | None = None,
    progress: Emit | None = None,
) -> Verdict:
    """Judge a kernel and return the verdict that every report renders.

    Args:
        spec: a KernelSpec, the name of a built-in or installed one, or a kernel file as FILE[:SPEC].
        capture: a capture, or its folder; its real inputs decide first.
        call: judge this captured call alone (a Call, or its key).
        op: glob over the capture's calls, where it is not `spec.sites` that should decide.
        partial: judge what is intact of a capture that is torn or damaged.
        target: "recorded" judges what the run recorded and does not run the kernel.
        sweep: judge drawn inputs as well; without a capture there is nothing else.
        quick: of drawn inputs judge the declared shapes only: no tile edges, adversarial values, layouts.
        dtypes, shapes: limit the drawn inputs; the dtypes must be declared.
        max_calls: captured calls to judge at most.
        seed: of everything drawn.
        fudge_factor, project_atol, max_reference_relative_error: gate constants in place of the spec's.
        isolate: judge in child processes, so that a crash or a hang is a verdict; needs a name or a file.
        timeout: with `isolate`, the seconds after which a silent kernel counts as hanging.
        jobs: with `isolate`, processes that share the cases; None: as many as cores and cases are worth.
        progress: called with every event of the judgement.

    Raises:
        BridgeError: the arguments, the capture or the spec cannot be served, or the kernel raised.
    """
    source = None if isinstance(spec, KernelSpec) else str(spec)
    is_file = source is not None and registry.looks_like_file(source)
    opened = None if capture is None or isinstance(capture, str | Path) else capture
    request = Request(
        op=op if source is None or is_file else source,
        kernel=source if is_file else None,
        capture=None if capture is None else str(capture if opened is None else opened.path),
        call=call if call is None or isinstance(call, str) else call.key,
        partial=partial,
        target=target,
        sweep=sweep,
        quick=quick,
        max_calls=max_calls,
        dtypes=tuple(dtypes),
        shapes=tuple(tuple(shape) for shape in shapes),
        seed=seed,
        constants=ConstantChoice(
            fudge_factor=fudge_factor,
            project_atol=project_atol,
            max_reference_relative_error=max_reference_relative_error,
        ),
    )
    if isolate:
        if isinstance(spec, KernelSpec):
            raise UsageError(
                "isolate=True loads the kernel in another process: give its name or FILE, not a spec"
            )
        from bridge.verify.isolate import verify_isolated

        return verify_isolated(request, timeout=timeout, jobs=jobs, progress=progress)
    from bridge.verify.session import execute

    loaded = registry.from_object(spec) if isinstance(spec, KernelSpec) else None
    return execute(request, emit=progress, loaded=loaded, capture=opened)
