"""The one file that knows torch's private DebugMode.

A subclass, because torch looks for an instance of it: Inductor, DTensor and the aot_eager interpreter
report to the active DebugMode. Everything that renders strings is overridden. torch 2.11 keeps the
class in one module, 2.12 and later in a package; both import from the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.eval_frame
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bridge.capture.launches import InductorLaunch
from bridge.capture.recorder import Recorder
from bridge.capture.schema import op_info

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_modes_below: Any = torch._C._len_torch_dispatch_stack


class StepMode(DebugMode):  # type: ignore[no-untyped-call]
    """Shows every dispatched operator to a recorder, before and after it runs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(record_output=False, record_profiler_context=False)
        self._recorder = recorder
        self._passing: Any = None

    def see(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator with the recorder looking on."""
        kwargs = kwargs or {}
        recorder = self._recorder
        # Modes below this one are rare, and one of them may be tracing.
        if recorder.muted or (types and FakeTensor in types) or (_modes_below() and self._is_tracing()):
            return func(*args, **kwargs)
        wrapped = types and any(kind not in _PLAIN for kind in types)
        if wrapped and self._passing is func:
            # Second sight of a wrapper's operator: the wrapper's own handler takes it from here.
            self._passing = None
            return NotImplemented
        info = op_info(func)
        if info.silent and not wrapped:
            result = func(*args, **kwargs)
            try:
                recorder.passed(info, result)
            except Exception as error:
                recorder.problem(f"noting {func}", error)
            return result
        try:
            pending = recorder.begin(func, args, kwargs)
        except Exception as error:
            recorder.problem(f"recording the inputs of {func}", error)
            pending = None
        # Only what has an index was given one: silent operators make no call and are nobody's parent.
        parent = pending.index if pending is not None else -1
        try:
            if parent >= 0:
                recorder.parents.append(parent)
            result = self._through(func, args, kwargs) if wrapped else func(*args, **kwargs)
        except BaseException as error:
            if pending is not None:
                with contextlib.suppress(Exception):  # the step's own error matters more than our note of it
                    recorder.failed(pending, error)
            raise
        finally:
            if parent >= 0:
                recorder.leave_parent(parent)
        if pending is not None:
            try:
                recorder.end(pending, result)
            except Exception as error:
                recorder.problem(f"recording the outputs of {func}", error)
        return result

    def _through(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Run a wrapper subclass's operator with this mode on, so that what it does inside is seen as well.
        self._passing = func
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            self._passing = None

    @staticmethod
    def _is_tracing() -> bool:
        return isinstance(_get_current_dispatch_mode(), FakeTensorMode)

    def _record_call(self, call: Any) -> None:
        """Nothing: a DebugMode would render the call's arguments as text here."""

    def _record_call_output(self, call: Any, output: Any) -> None:
        """Nothing, as above."""

    def record_output_placements(self, output_spec: Any) -> None:
        """Nothing: placements are read off the DTensors themselves."""

    @contextlib.contextmanager
    def record_redistribute_calls(
        self,
        arg: Any,
        src_placement: Any,
        dst_placement: Any,
        transform_info_str: str | None = None,
        is_explicit: bool = False,
    ) -> Iterator[None]:
        """Let the redistribution's collectives speak for themselves."""
        yield

    def record_triton_kernel(self, kernel_name: str, kwargs: dict[str, Any]) -> Any:
        """A kernel that Inductor launches inside a compiled region."""
        return InductorLaunch(self._recorder, kernel_name, kwargs)


# torch wraps a mode's handler so that Dynamo stays out of it, at several microseconds a call. That is needed
# only while Dynamo watches frames, so the wrapped handler is kept for then.
_watching: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)
_skip_code: Any = getattr(torch._dynamo.eval_frame, "skip_code", None)
_disable: Any = torch._dynamo.disable
_see_undisturbed: Any = _disable(StepMode.see, recursive=True)


def _dispatch(
    self: StepMode, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    if _watching() is None:
        return self.see(func, types, args, kwargs)
    return _see_undisturbed(self, func, types, args, kwargs)


_handler: Any = _see_undisturbed
if _skip_code is not None:
    _skip_code(_dispatch.__code__)
    _handler = _dispatch
type.__setattr__(StepMode, "__torch_dispatch__", _handler)
