"""Turn a tensor that a call sees into a record, digesting and storing its content once."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from msgspec.structs import replace

from bridge.capture.contents import Contents
from bridge.capture.device import aside
from bridge.capture.dtypes import DTYPES
from bridge.capture.identity import Storages, place_of
from bridge.capture.record import TensorRecord

State = Literal[0, 1, 2, 3]
VALUES: Final = 0
LATER: Final = 1
IGNORED: Final = 2
PART: Final = 3

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPE_NAMES: dict[torch.dtype, str] = {}
_DEVICE_NAMES: dict[torch.device, str] = {}


class Observer:
    """Makes records; owns the identities of a step's storages."""

    def __init__(self, contents: Contents) -> None:
        self.storages = Storages()
        self.contents = contents

    def record(
        self,
        tensor: torch.Tensor,
        name: str,
        key: str = "",
        store: bool = False,
        state: State = VALUES,
        maker: int | None = None,
    ) -> TensorRecord:
        """Record a tensor as it is now.

        Args:
            tensor: Any tensor; a wrapper subclass is recorded by what it holds on this rank.
            name: Its path among the call's arguments.
            key: Of the call, to say in whose name bytes were dropped.
            store: Keep its bytes.
            state: VALUES; LATER for a result that another stream or thread still writes; IGNORED for an
                argument whose bytes do not matter, since it is only filled; PART for the part that was filled
                of memory that holds nothing else yet.
            maker: The call that returned it; if its storage is new, that call wrote it.
        """
        if type(tensor) not in _PLAIN:
            return self._wrapped(tensor, name, key, store, state, maker)
        return self._plain(tensor, name, key, store, state, maker)

    def written(self, tensor: torch.Tensor, writer: int, *, partly: bool = False) -> None:
        """Call number `writer` has written the memory that a tensor shows, or a part of it."""
        for local in local_tensors(tensor):
            if _has_bytes(local):
                entry = self.storages.entry(local)
                if entry.writer is not None and entry.writer > writer:
                    continue  # a call inside this one, such as a DTensor's local operator, has been noted
                garbage = entry.garbage and partly
                self.storages.written(entry, writer)
                entry.garbage = garbage

    def due(self, tensor: torch.Tensor) -> None:
        """A collective has returned and not delivered yet what this tensor is to hold."""
        for local in local_tensors(tensor):
            if _has_bytes(local):
                self.storages.entry(local).due = True

    def delivers(self, target: Any, source: Any) -> bool:
        """Whether copying source to target is how a collective hands over its result (gloo's `wait` does so).

        The source is memory that the collective filled and nobody has seen; from here on it is its result.
        """
        if type(target) not in _PLAIN or type(source) not in _PLAIN:
            return False
        if not (_has_bytes(target) and _has_bytes(source)) or not self.storages.knows(target):
            return False
        entry = self.storages.entry(target)
        if not entry.due or self.storages.knows(source):
            return False
        self.storages.entry(source, entry.writer)
        dtype = _dtype_name(target.dtype)
        content = entry.contents.get(place_of(target, dtype))
        alike = source.dtype == target.dtype and source.shape == target.shape
        if content is not None and not content.digested and alike and source.is_contiguous():
            # Recorded when the collective returned, as a content that was not there yet: this is it.
            self.contents.digest(source, place_of(source, dtype), content)
        return True

    def distrust(self, tensor: torch.Tensor) -> None:
        """Something that is not seen into was given a tensor and may have written it."""
        for local in local_tensors(tensor):
            if _has_bytes(local):
                self.storages.distrust(self.storages.entry(local))

    def allocated(self, tensor: torch.Tensor) -> None:
        """A tensor was made without values."""
        for local in local_tensors(tensor):
            if _has_bytes(local) and local.numel() and not self.storages.knows(local):
                self.storages.entry(local).garbage = True

    def unchanged(self, tensor: torch.Tensor) -> bool:
        """The memory that a tensor shows still has the contents that it had when last recorded.

        Known only for host memory; False means "changed, or not known".
        """
        for local in local_tensors(tensor):
            if not local.is_cpu or not _has_bytes(local):
                return False
            entry = self.storages.entry(local)
            place = place_of(local, _dtype_name(local.dtype))
            content = self.storages.content(entry, place)
            if not content.digested or not self.contents.still(local, place, content):
                return False
        return True

    def _plain(
        self, tensor: torch.Tensor, name: str, key: str, store: bool, state: State, maker: int | None
    ) -> TensorRecord:
        dtype = _DTYPE_NAMES.get(tensor.dtype) or _dtype_name(tensor.dtype)
        device = "cpu" if tensor.is_cpu else _DEVICE_NAMES.get(tensor.device) or _device_name(tensor.device)
        try:
            # A storage that is known has bytes: one look instead of the many that find that out.
            entry = self.storages.find(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # sparse ones and functorch's wrappers have none
            entry = None
        if entry is None and not _has_bytes(tensor):
            return TensorRecord(
                name=name,
                dtype=dtype,
                shape=tuple(tensor.shape),
                device=device,
                requires_grad=tensor.requires_grad,
            )
        if tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()):
            # Lazily negated or conjugated: the bytes in memory are not the values, so a copy is recorded.
            with aside():
                tensor = tensor.resolve_conj().resolve_neg()
            entry = None
        if entry is None:
            entry = self.storages.entry(tensor, maker)
        number = -1
        place = place_of(tensor, dtype)
        known = not entry.garbage or state == PART or place in entry.contents
        if state != IGNORED and known and dtype in DTYPES:
            content = self.storages.content(entry, place)
            number = content.number
            if state != LATER:
                # First, since whoever writes the bytes digests them too.
                if store and not content.stored:
                    self.contents.store(tensor, place, content, key=key, name=name)
                if not content.digested:
                    self.contents.digest(tensor, place, content)
        return TensorRecord(
            name=name,
            dtype=dtype,
            shape=tensor.shape,
            stride=tensor.stride(),
            offset=place[0],
            device=device,
            requires_grad=tensor.requires_grad,
            storage=entry.number,
            epoch=entry.epoch,
            producer=entry.writer,
            content=number,
        )

    def _wrapped(
        self, tensor: torch.Tensor, name: str, key: str, store: bool, state: State, maker: int | None
    ) -> TensorRecord:
        kind = type(tensor).__name__
        if isinstance(tensor, torch.nn.Parameter) and not hasattr(tensor, "_local_tensor"):
            return self._plain(tensor, name, key, store, state, maker)
        local = getattr(tensor, "_local_tensor", None)
        spec = getattr(tensor, "_spec", None)
        if isinstance(local, torch.Tensor) and spec is not None:
            inner = self.record(local, name, key, store, state, maker)
            return _with_placement(inner, tensor, spec, kind)
        if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and _has_bytes(tensor):
            # A subclass that only adds Python attributes is a plain tensor underneath.
            return replace(self._plain(tensor, name, key, store, state, maker), subclass=kind)
        return TensorRecord(
            name=name,
            dtype=_dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            device=_device_name(tensor.device),
            requires_grad=tensor.requires_grad,
            subclass=kind,
        )


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's bytes on this rank; [] for a wrapper that we do not know."""
    if type(tensor) in _PLAIN:
        return [tensor]
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return local_tensors(local)
    elem = getattr(tensor, "elem", None)
    if isinstance(elem, torch.Tensor):
        return local_tensors(elem)
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return [tensor]
    return []


def _has_bytes(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _with_placement(inner: TensorRecord, tensor: Any, spec: Any, kind: str) -> TensorRecord:
    mesh = spec.mesh
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    sizes = ", ".join(f"{label}={size}" for label, size in zip(names, mesh.shape, strict=False))
    placements = tuple(_placement(p) for p in spec.placements)
    return replace(
        inner,
        subclass=kind,
        mesh=f"({sizes})",
        placements=placements,
        global_shape=tuple(tensor.shape),
        requires_grad=tensor.requires_grad,
    )


def _placement(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate()"
    if placement.is_partial():
        return f"Partial({getattr(placement, 'reduce_op', 'sum')})"
    return f"{type(placement).__name__.lstrip('_')}({placement.dim})"


def _dtype_name(dtype: torch.dtype) -> str:
    name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def _device_name(device: torch.device) -> str:
    name = _DEVICE_NAMES[device] = str(device)
    return name
