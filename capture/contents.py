"""Digest and store contents of a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bridge.capture import digest as digests
from bridge.capture import digest_host, forecast
from bridge.capture.device import DeviceDigests
from bridge.capture.dtypes import itemsize
from bridge.capture.identity import Content, Place
from bridge.capture.lanes import DeviceLane, HostLane
from bridge.capture.lines import ContentLine
from bridge.capture.loads import Blob
from bridge.capture.phase import current_node
from bridge.capture.record import Digest
from bridge.capture.writer import RankWriter


class Contents:
    """Where contents go; one for a step."""

    def __init__(
        self, writer: RankWriter, *, max_tensor_bytes: int | None = None, parameters: int | None = None
    ) -> None:
        """Nothing is taken yet.

        Args:
            writer: Of the rank.
            max_tensor_bytes: Larger tensors are not stored.
            parameters: Bytes of the model's, where every call is stored.
        """
        self._writer = writer
        self._max_tensor_bytes = max_tensor_bytes
        self._lines: list[ContentLine] = []
        self._devices: dict[torch.device, DeviceDigests] = {}
        self.digested_bytes = 0
        self._parameters = parameters
        self._forward_bytes = 0
        self._foreseen = False
        if parameters:
            writer.foresee(forecast.at_least(parameters))

    def digest(self, tensor: torch.Tensor, place: Place, content: Content) -> None:
        """Digest a content that has not been digested."""
        content.digested = True
        dtype: str = place[2]
        if content.count == 0:
            self._lines.append(ContentLine(content=content.number, digest=digests.EMPTY))
            return
        nbytes = content.count * _size(dtype)
        self.digested_bytes += nbytes
        if tensor.is_cpu:
            if len(place) == 3:
                digest = digest_host.digest_bytes(tensor.data_ptr(), content.count, dtype)
            else:
                with HostBytes(tensor, place, nbytes) as (address, _):
                    digest = digest_host.digest_bytes(address, content.count, dtype)
            content.hash = digest.hash
            self._lines.append(ContentLine(content=content.number, digest=digest))
        else:
            self._device(tensor.device).add(content.number, tensor, place)

    def still(self, tensor: torch.Tensor, place: Place, content: Content) -> bool:
        """A host tensor's bytes are those that were digested as `content`."""
        if content.count == 0:
            return True
        if not content.hash:
            self._writer.drain()  # a writing thread has it
        with HostBytes(tensor, place, content.count * _size(place[2])) as (address, _):
            return digest_host.digest_bytes(address, content.count, place[2]).hash == content.hash

    def store(
        self,
        tensor: torch.Tensor,
        place: Place,
        content: Content,
        *,
        key: str,
        name: str,
    ) -> None:
        """Copy a content that has not been stored, or note why not."""
        content.stored = True
        dtype: str = place[2]
        nbytes = content.count * _size(dtype)
        if self._max_tensor_bytes is not None and nbytes > self._max_tensor_bytes:
            reason: str | None = f"larger than {self._max_tensor_bytes} bytes"
        else:
            self._foresee(nbytes)
            reason = self._writer.refuses(nbytes)
        if reason is not None:
            self._writer.drop(key=key, tensor=name, nbytes=nbytes, reason=reason)
            return
        device = "cpu" if tensor.is_cpu else str(tensor.device)
        lane: Any = self._writer.lane(
            device, HostLane if tensor.is_cpu else partial(DeviceLane, tensor.device)
        )
        # One that passes in parts is digested here, so that its sums are rounded as they always are.
        handed = tensor.is_cpu and not content.digested and 0 < nbytes <= lane.pool.chunk_bytes
        blob = Blob(
            content=content.number,
            key=key,
            tensor=name,
            dtype=dtype,
            shape=_shape_in_memory(tensor),
            nbytes=nbytes,
            count=content.count,
            digested=partial(_note, content) if handed else None,
        )
        if not tensor.is_cpu:
            self._writer.put_blob(blob, device, lane.bytes_of(tensor, place))
        elif len(place) == 3:
            self._writer.put_blob(blob, device, tensor.data_ptr())
        else:
            with HostBytes(tensor, place, nbytes) as (address, _):
                self._writer.put_blob(blob, device, address)
        content.digested = content.digested or handed

    def _foresee(self, nbytes: int) -> None:
        if self._foreseen:
            return
        if current_node() is None:
            self._forward_bytes += nbytes
        else:
            self._foreseen = True
            self._writer.foresee(forecast.expected(self._forward_bytes, parameters=self._parameters))

    def lines(self) -> list[ContentLine]:
        """Digests known since the last time this was asked."""
        lines, self._lines = self._lines, []
        return lines

    def collect(self) -> list[ContentLine]:
        """All digests, at the end of the step; waits for the devices."""
        for device in self._devices.values():
            self._lines.extend(
                ContentLine(content=number, digest=digest) for number, digest in device.collect()
            )
        return self.lines()

    def _device(self, device: torch.device) -> DeviceDigests:
        found = self._devices.get(device)
        if found is None:
            found = self._devices[device] = DeviceDigests(device)
        return found


class HostBytes:
    """A content's bytes in host memory during a `with`: their address, and the array if they were copied.

    No operator is dispatched, so neither autograd nor any mode notices.
    """

    def __init__(self, tensor: torch.Tensor, place: Place, nbytes: int) -> None:
        self._owned: npt.NDArray[np.uint8] | None = None
        size = _size(place[2])
        self._address = tensor.data_ptr() if nbytes else 0
        if len(place) > 3 and nbytes:
            _, _, _, sizes, strides = place
            reach = 1 + sum((extent - 1) * step for extent, step in zip(sizes, strides, strict=True))
            base = digest_host.view(self._address, reach * size)
            elements = base.view(_word(size))
            gathered = np.lib.stride_tricks.as_strided(
                elements, sizes, [step * elements.itemsize for step in strides]
            )
            self._owned = np.ascontiguousarray(gathered).reshape(-1).view(np.uint8)
            self._address = self._owned.ctypes.data

    def __enter__(self) -> tuple[int, npt.NDArray[np.uint8] | None]:
        return self._address, self._owned

    def __exit__(self, *_: object) -> None:
        self._owned = None


def _word(size: int) -> Any:
    return {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}[size]


def _shape_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a blob: the tensor's own in the order of memory, repeated ones as 1."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if tensor.is_contiguous():
        return shape
    kept = [size if step else 1 for size, step in zip(shape, stride, strict=True)]
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    return tuple(kept[dim] for dim in order)


def _size(dtype: str) -> int:
    size = itemsize(dtype)
    assert size is not None, f"a content of {dtype} has no bytes"
    return size


def _note(content: Content, digest: Digest) -> None:
    content.hash = digest.hash
