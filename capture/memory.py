"""Memory that is given back behind the dispatcher's back: read what waits in it first.

`storage.resize_(0)`, which is how FSDP frees gathered parameters, dispatches no operator, and holding a
reference to the storage does not keep its memory. Contents of a GPU waiting to be digested would be lost.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.capture.recorder import Recorder


class MemoryHooks:
    """Wraps `UntypedStorage.resize_`, from `install` to `remove`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._installed = False

    def install(self) -> None:
        """Begin to watch. The method is inherited, so ours merely hides it for a while."""
        storage: Any = torch.UntypedStorage
        if "resize_" in vars(storage):
            return  # somebody else's wrapper stands there: two of them could not be taken off in any order
        original = storage.resize_
        recorder = self._recorder

        def resize_(self: Any, *args: Any) -> Any:
            try:
                recorder.observer.contents.flush()
            except Exception as error:
                recorder.problem("reading memory before it is given back", error)
            return original(self, *args)

        storage.resize_ = resize_
        self._installed = True

    def remove(self) -> None:
        """Show the inherited method again."""
        if self._installed:
            storage: Any = torch.UntypedStorage
            del storage.resize_
            self._installed = False
