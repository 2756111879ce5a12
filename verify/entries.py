"""The cases of a judgement as they are taken up one by one: read late, announced, settled, let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import overload

import torch

from bridge.errors import KernelError
from bridge.verify.case import Case
from bridge.verify.request import WEIGHING, Emit, Phase, Started, Unusable

#: How often a captured case is read again is cheap; holding all of them is not.
Load = Callable[[], Case]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A planned case; captured ones are read when they are taken up and let go afterwards."""

    name: str
    family: str
    load: Load


def entry_of(case: Case) -> Entry:
    """A case that is held all along: drawn ones are small."""
    return Entry(name=case.name, family=case.family, load=partial(_same, case))


def _same(case: Case) -> Case:
    return case


@contextmanager
def one_thread(threads: int = 1) -> Iterator[None]:
    """Torch on this many threads: drawn tensors are small, and results must not depend on free cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Announced(Sequence[Case]):
    """Cases that say so when they are taken up: `judge` works through them one by one.

    This is how the process above knows which case a crash belongs to.
    """

    def __init__(
        self,
        entries: Sequence[tuple[int, Entry]],
        say: Emit,
        total: int,
        done: Callable[[Case], None],
        threads: Callable[[Entry], AbstractContextManager[None]],
    ) -> None:
        self._entries = entries
        self._say = say
        self._total = total
        self._done = done
        self._threads = threads

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Case]: ...
    def __getitem__(self, index: int | slice) -> Case | Sequence[Case]:
        if isinstance(index, slice):
            return [entry.load() for _, entry in self._entries[index]]
        return self._entries[index][1].load()

    def __iter__(self) -> Iterator[Case]:
        for number, entry in self._entries:
            self._say(Started(case=entry.name, number=number, total=self._total))
            case = entry.load()
            with self._threads(entry):
                yield case
                settle(case, self._say)
                self._done(case)
        self._say(Phase(name=WEIGHING))


def settle(case: Case, say: Emit) -> None:
    """Find an illegal access on a GPU now, while it is known which case it belongs to."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        say(Unusable(reason=reason))
        raise KernelError(f"the target broke the GPU context on {case.name}: {reason}") from error
