"""Everything that is installed for the length of one step, and taken off again after it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bridge.capture._debugmode import StepMode
from bridge.capture.contents import Contents
from bridge.capture.digest import BYTE_TYPES
from bridge.capture.digest_host import walker_name
from bridge.capture.dtypes import itemsize
from bridge.capture.launches import LaunchHooks
from bridge.capture.modules import ModuleHooks
from bridge.capture.recorder import Recorder
from bridge.capture.select import Matcher
from bridge.capture.writer import RankReport, RankWriter


class StepSession:
    """One captured step of one rank."""

    def __init__(
        self,
        writer: RankWriter,
        matcher: Matcher,
        *,
        parts: list[nn.Module],
        step: int,
        rank: int,
        max_tensor_bytes: int | None,
        eager: bool = False,
    ) -> None:
        self._writer = writer
        self.recorder = Recorder(
            writer, matcher, _contents(writer, matcher, parts, max_tensor_bytes), step=step, rank=rank
        )
        self._modules = ModuleHooks(self.recorder, parts)
        self._launches = LaunchHooks(self.recorder)
        self._mode: Any = StepMode(self.recorder)
        self._eager = eager
        self._stance: Any = None
        self._handles: list[Any] = []
        self._frozen = False
        self.interrupted = False
        self.seconds = 0.0
        self._began = 0.0

    def start(self) -> None:
        """Install everything."""
        self._began = time.perf_counter()
        # A step's records are many, and with them come collections of garbage; what is frozen, all that the
        # run made before, is not looked through each time.
        self._frozen = gc.get_freeze_count() == 0
        if self._frozen:
            gc.freeze()
        if self._eager:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
        self._modules.install()
        self._launches.install()
        self._handles = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        self._mode.__enter__()

    def stop(self, error: BaseException | None) -> None:
        """Take everything off; nothing here may raise into the step."""
        self._mode.__exit__(type(error) if error else None, error, None)
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._launches.remove()
        self._modules.remove()
        if error is not None:
            self.interrupted = True
            text = f"the step raised {type(error).__name__} after {self.recorder.seen} calls"
            self._writer.problems.append(text)
        try:
            self.recorder.finish()
        except Exception as failure:
            self.recorder.problem("collecting the digests", failure)
        if self._frozen:
            gc.unfreeze()
        self.seconds = time.perf_counter() - self._began

    def close(self) -> RankReport:
        """Write everything out."""
        self.recorder.observer.storages.close()
        return self._writer.close(calls=len(self.recorder.emitted))

    def _optimizer_begins(self, *_: Any) -> None:
        self.recorder.stage.in_optimizer = True

    def _optimizer_ends(self, *_: Any) -> None:
        self.recorder.stage.in_optimizer = False


def _contents(
    writer: RankWriter, matcher: Matcher, parts: list[nn.Module], max_tensor_bytes: int | None
) -> Contents:
    parameters = None
    if matcher.everything:
        own = [getattr(p, "_local_tensor", p) for part in parts for p in part.parameters()]
        parameters = sum(p.numel() * p.element_size() for p in own)
    return Contents(writer, max_tensor_bytes=max_tensor_bytes, parameters=parameters)


def warm_up(parts: list[nn.Module]) -> None:
    """Do before the step what would otherwise be done in it: imports and compilation."""

    StepMode(None)  # type: ignore[arg-type]
    walker_name()
    if not torch.cuda.is_available():
        return
    from bridge.capture.device import DeviceDigests

    dtypes = {"float32", "int64"}
    for part in parts:
        dtypes |= {str(tensor.dtype).removeprefix("torch.") for tensor in part.parameters()}
    if torch.cuda.is_bf16_supported():
        dtypes.add("bfloat16")
    DeviceDigests(torch.device("cuda", torch.cuda.current_device())).warm_up(
        {dtype for dtype in dtypes if itemsize(dtype) and dtype not in BYTE_TYPES}
    )


def distributed_place() -> tuple[int, int]:
    """Rank and number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


@contextlib.contextmanager
def rank_zero_first(rank: int, world_size: int) -> Iterator[None]:
    """Other ranks wait at the end until rank 0 has got there; no collective runs.

    Every rank must come here the same number of times.
    """
    yield
    if world_size == 1 or not torch.distributed.is_initialized():
        return
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    key = f"bridge-capture-{next(_turns)}"
    if rank == 0:
        store.set(key, "")
    else:
        store.wait([key])


_turns = itertools.count()


def run_flags() -> dict[str, Any]:
    """Switches of this process that change numerics."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "digest": walker_name(),
    }
