"""Run any training script with a recorder around its optimizer steps; the script is not edited.

A step is what lies between two optimizer steps, the second included. Steps are counted by torch's
global optimizer hooks, so gradient accumulation, GradScaler and trainers of other libraries count
as they train. With several optimizers a step is over when each of them has stepped. The model is
found through the optimizer's parameters.

On steps that are not recorded nothing but the counter and a note of each loss is at work.
"""

from __future__ import annotations

import contextlib
import gc
import runpy
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from bridge.capture.steps import Abandoned, RunFacts, StepRecorder
from bridge.errors import BridgeError, ConfigError, RunError, StepNotReachedError

#: Modules that only wrap the user's model; names inside it should not start with "module.".
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


class _Finished(BaseException):
    """Leaves the script; no `except Exception` on the way takes it for a failure."""


def run_script(
    script: str | Path,
    args: Sequence[str],
    recorder: StepRecorder,
    *,
    config_path: str | None = None,
    stop: bool = True,
) -> None:
    """Run `script` as `python script args` would, until the recorder has what it wants.

    Args:
        script: Path of a Python file.
        args: Its command line.
        recorder: Told about every optimizer step.
        config_path: Where the request came from, for the manifest.
        stop: Leave the script after the last wanted step; False lets it run to its own end.

    Raises:
        ConfigError: There is no such script.
        StepNotReachedError: The script ended before the step came.
        RunError: The script failed for a reason of its own.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"there is no training script {path}")
    facts = RunFacts(config={"script": str(path), "args": list(args)}, config_path=config_path, seed=None)
    counter = _StepCounter(recorder, facts, stop=stop)
    saved_argv, saved_path = sys.argv, list(sys.path)
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with counter.installed():
            runpy.run_path(str(path), run_name="__main__")
    except _Finished:
        pass
    except (BridgeError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        if error.code not in (None, 0) and not recorder.finished:
            raise RunError(f"{path} exited with {error.code} in step {counter.steps + 1}") from error
    except Exception as error:
        if recorder.failure is None:
            what = f"{type(error).__name__}: {error}"
            raise RunError(f"{path} failed in step {counter.steps + 1}: {what}") from error
    finally:
        sys.argv = saved_argv
        sys.path[:] = saved_path
    if not recorder.finished:
        raise StepNotReachedError(_ended_early(path, recorder, counter))


def _ended_early(path: Path, recorder: StepRecorder, counter: _StepCounter) -> str:
    if counter.steps == 0:
        return f"{path} ended without an optimizer step, so nothing could be captured; does it train?"
    return recorder.not_reached(counter.steps)


class _StepCounter:
    """Counts optimizer steps and opens and closes the recorder's steps at their borders."""

    def __init__(self, recorder: StepRecorder, facts: RunFacts, *, stop: bool) -> None:
        self.steps = 0
        self._recorder = recorder
        self._facts = facts
        self._stop = stop
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._expected: set[int] = set()  # optimizers that stepped in the last round
        self._round: set[int] = set()
        self._losses: list[torch.Tensor] = []
        self._grad_norm: float | None = None
        self._open: AbstractContextManager[Any] | None = None
        self._handles: list[Any] = []
        self._plain_call = torch.nn.Module.__call__

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks are in place inside, and gone outside."""
        plain_backward = torch.autograd.backward

        def noting_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            root = tensors if isinstance(tensors, torch.Tensor) else None
            if root is not None and root.numel() == 1 and root.is_floating_point():
                with _disable_current_modes():
                    self._losses.append(root.detach())
            plain_backward(tensors, *args, **kwargs)

        torch.autograd.backward = noting_backward
        self._handles = [register_optimizer_step_pre_hook(self._before_optimizer)]
        self._recorder.begins(1)
        if self._recorder.starts_at(1):
            self._open_at_first_call()
        try:
            yield
        finally:
            torch.autograd.backward = plain_backward
            torch.nn.Module.__call__ = self._plain_call  # type: ignore[method-assign]
            for handle in self._handles:
                handle.remove()
            if self._open is not None and sys.exc_info()[0] is None:
                self._close((Abandoned, Abandoned(), None))
            else:
                self._close(sys.exc_info())

    def _open_at_first_call(self) -> None:
        """Begin step 1 when a module with parameters is first called.

        No optimizer has stepped by then, so the model is not known earlier; and a hook would be too late,
        since the hooks of a call are fixed before the first of them runs.
        """
        plain = self._plain_call

        def opening(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and next(module.parameters(), None) is not None:
                torch.nn.Module.__call__ = plain  # type: ignore[method-assign]
                self._begin(1, find_models(list(module.parameters())))
            return plain(module, *args, **kwargs)

        torch.nn.Module.__call__ = opening  # type: ignore[method-assign]

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            # On the instance: torch runs these after the global hooks, which the end of a recorded step
            # may take away; a dictionary must not change while torch walks it.
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer))
        if self._open is not None:
            self._grad_norm = _gradient_norm(optimizer)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._round:
            # One that stepped in the last round no longer does; this round had ended before.
            self._finish_round()
        self._round.add(id(optimizer))
        if self._expected <= self._round:
            self._finish_round()

    def _finish_round(self) -> None:
        self._expected, self._round = self._round, set()
        self.steps += 1
        if self._open is not None:
            self._close((None, None, None))
            if self._recorder.finished and self._stop:
                raise _Finished
        self._losses.clear()
        self._recorder.begins(self.steps + 1)
        if self._recorder.starts_at(self.steps + 1):
            parameters = [p for optimizer in self._optimizers for p in _parameters(optimizer)]
            self._begin(self.steps + 1, find_models(parameters))

    def _begin(self, step: int, models: Sequence[torch.nn.Module]) -> None:
        self._recorder.attach(models, self._facts)
        self._open = self._recorder.open(step)
        self._open.__enter__()

    def _close(self, failure: tuple[Any, Any, Any]) -> None:
        if self._open is None:
            return
        opened, self._open = self._open, None
        if failure[0] is None:
            with _disable_current_modes():
                losses = [loss.float().cpu() for loss in self._losses]
                # Loops that accumulate scale each part, so that the parts sum to the step's loss.
                total = float(torch.stack(losses).sum()) if losses else None
            self._recorder.metrics(self.steps, loss=total, grad_norm=self._grad_norm)
        opened.__exit__(*failure)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradient_norm(optimizer: torch.optim.Optimizer) -> float | None:
    grads = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    with _disable_current_modes(), torch.no_grad():
        plain = [g for g in grads if type(g) is torch.Tensor and not g.is_sparse]
        if not plain or len(plain) != len(grads):
            return None
        return float(
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in plain]).cpu())
        )


def find_models(parameters: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
    """Outermost modules that own some of `parameters`, without mere wrappers.

    Looks through all live modules once, so that a script need not say where its model is.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    parents: dict[int, list[torch.nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    pending = [m for m in modules if any(id(p) in wanted for p in m._parameters.values())]
    seen: set[int] = set()
    tops: list[torch.nn.Module] = []
    while pending:
        module = pending.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module), [])
        pending.extend(above)
        if not above:
            tops.append(module)
    return [_unwrap(module) for module in tops]


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while (inner := _WRAPPERS.get(type(module).__name__)) is not None and isinstance(
        found := getattr(module, inner, None), torch.nn.Module
    ):
        module = found
    return module
