"""From a request to the kernel and the capture that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import CaptureError, CorruptCaptureError, UsageError, near_misses
from bridge.verify import registry
from bridge.verify.registry import LoadedSpec
from bridge.verify.request import Request
from bridge.verify.spec import KernelSpec

if TYPE_CHECKING:
    from bridge.capture.store import Capture


def refuse_torn(capture: Capture, *, partial: bool) -> None:
    """A capture whose writer died is judged only on request: what it lacks may be what diverged."""
    try:
        torn = [text for text in capture.problems if text not in capture.manifest.problems]
    except CorruptCaptureError as error:
        raise CorruptCaptureError(f"{error}, or judge what is intact with --partial") from None
    if not capture.calls:
        raise CaptureError(
            f"{capture.path} holds no calls{': ' + torn[0] if torn else ''}; capture the step again"
        )
    if torn and not partial:
        raise CaptureError(f"{capture.path}: {torn[0]}; capture again, or judge what is there with --partial")


def load(request: Request, capture: Capture | None) -> LoadedSpec:
    """The spec that a request names, or one made for an override or a pair of functions."""
    if request.kernel is not None:
        return _load_file(request, request.kernel)
    if request.reference is not None and request.target_fn is not None:
        from bridge.verify.pair import pair_spec

        return pair_spec(
            request.reference,
            request.target_fn,
            op=request.op,
            capture=capture,
            shapes=request.shapes,
            dtypes=request.dtypes,
        )
    if request.op is None:
        raise UsageError("nothing to judge: name a kernel with --op NAME or --kernel FILE")
    if capture is not None and request.op not in registry.known_names():
        from bridge.verify import auto

        name = request.op if "." in request.op else auto.site_override(request.op, capture)
        if name is not None:
            return auto.override_spec(name, capture)
    if capture is None and "." in request.op and request.op not in registry.known_names():
        raise UsageError(
            f"unknown op {request.op!r}; an override, module.function, is judged on the calls of a run: "
            "add --from CAPTURE"
        )
    return registry.load_spec(request.op)


def _load_file(request: Request, kernel: str) -> LoadedSpec:
    loaded = registry.load_spec(kernel, op=request.op)
    known = (loaded.spec.name, *registry.known_names())
    if request.op is not None and request.capture is None and request.op not in known:
        raise UsageError(
            f"--op {request.op!r} is not the kernel in {kernel}; {near_misses(request.op, known)}"
        )
    return loaded


def check_choices(spec: KernelSpec, request: Request) -> None:
    """Raise UsageError for dtypes and shapes that the spec does not declare."""
    for dtype in request.dtypes:
        if dtype not in spec.dtypes:
            raise UsageError(
                f"op {spec.name} does not declare dtype {dtype!r} (declared: {', '.join(spec.dtypes)})"
            )
    ranks = {len(shape) for shape in spec.shapes}
    for shape in request.shapes:
        if len(shape) not in ranks:
            known = ", ".join(map(str, spec.shapes))
            raise UsageError(f"op {spec.name} does not declare shapes like {shape} (declared: {known})")
