"""Which tensors of a step hold the same bytes: storages, epochs of their contents, and who wrote them.

A content is (storage, epoch, place in it, element type). A storage is known by the address of its
StorageImpl together with a weak reference that we hold: without the reference the allocator hands the
same address to the next tensor. The epoch is our own count of writes; `Tensor._version` is no use
here, because it is bumped late, or never, under dispatch modes, by fused optimizers and by raw kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge.capture.layout import layout_of

#: Place in a storage and element type: (offset, count, dtype) when dense, else with sizes and strides.
Place = tuple[Any, ...]


class Content:
    """One content: a number, and what has been done about it so far."""

    __slots__ = ("count", "digested", "hash", "number", "stored")

    def __init__(self, number: int, count: int) -> None:
        self.number = number
        self.count = count
        self.digested = False
        self.hash = ""  #: host memory only
        self.stored = False


class StorageEntry:
    """One storage of the step, alive or freed."""

    __slots__ = (
        "address",
        "contents",
        "due",
        "epoch",
        "garbage",
        "number",
        "unseen",
        "writer",
    )

    def __init__(self, number: int, address: int) -> None:
        self.number = number
        self.address = address
        self.epoch = 0
        self.writer: int | None = None  #: index of the call that made this epoch's contents
        self.contents: dict[Place, Content] = {}
        self.due = False  #: a collective has not delivered these contents yet
        self.garbage = False  #: allocated in this step and not written yet: the bytes mean nothing
        self.unseen = False  #: compiled code had it, and may have written it without our notice


class Storages:
    """All storages seen in one step. Not safe to share between threads; the step is one line of calls."""

    def __init__(self) -> None:
        self._entries: dict[int, StorageEntry] = {}
        self._references: list[int] = []  #: weak ones, counted in the storage itself
        self._contents = 0
        self.compiled = False  #: compiled code is running: between its operators it writes what it likes

    def entry(self, tensor: torch.Tensor, maker: int | None = None) -> StorageEntry:
        """The entry of a plain strided tensor's storage; a new one starts at epoch 0, written by `maker`."""
        storage = tensor.untyped_storage()
        found = self.find(storage)
        if found is None:
            reference: Any = storage._weak_ref()
            self._references.append(reference)
            found = self._entries[storage._cdata] = StorageEntry(len(self._entries), storage.data_ptr())
            found.unseen = self.compiled
            found.writer = maker
        return found

    def find(self, storage: torch.UntypedStorage) -> StorageEntry | None:
        """The entry of a storage that has been seen in this step, brought up to date."""
        found = self._entries.get(storage._cdata)
        if found is not None:
            if found.unseen or storage.data_ptr() != found.address:
                # resize_(), and FSDP's freeing and refilling of gathered parameters, give it new memory.
                found.address = storage.data_ptr()
                self.written(found, None)
            found.unseen = self.compiled
        return found

    def close(self) -> None:
        """Let go of the storages; their numbers mean nothing afterwards."""
        free: Any = torch.UntypedStorage._free_weak_ref
        references, self._references, self._entries = self._references, [], {}
        for reference in references:
            free(reference)

    def distrust(self, entry: StorageEntry) -> None:
        """Something that we do not see into was given this storage: look again when it is next seen."""
        entry.unseen = True

    def knows(self, tensor: torch.Tensor) -> bool:
        """The tensor's storage has been seen in this step."""
        return tensor.untyped_storage()._cdata in self._entries

    def written(self, entry: StorageEntry, writer: int | None) -> None:
        """Begin a new epoch of a storage that call number `writer` has written."""
        entry.epoch += 1
        entry.garbage = entry.due = False
        entry.writer = writer
        if entry.contents:
            entry.contents = {}

    def content(self, entry: StorageEntry, place: Place) -> Content:
        """What lies at a place of a storage now; a new number when it has not been seen."""
        found = entry.contents.get(place)
        if found is None:
            found = entry.contents[place] = Content(self._contents, place[1])
            self._contents += 1
        return found


def place_of(tensor: torch.Tensor, dtype: str) -> Place:
    """Where a tensor lies in its storage; equal for tensors that show the same elements in memory order."""
    offset = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return (offset, tensor.numel(), dtype)
    layout = layout_of(tuple(tensor.shape), tensor.stride())
    if layout.dense:
        return (offset, layout.count, dtype)
    return (offset, layout.count, dtype, layout.sizes, layout.strides)
