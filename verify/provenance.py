"""What is fixed before the target runs: constants, exact inputs, kernel source, versions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
import xxhash

from bridge.environment import device_name, package_versions
from bridge.verify import kernelfile, registry
from bridge.verify.case import Case
from bridge.verify.judge import constants_of
from bridge.verify.registry import LoadedSpec
from bridge.verify.request import Declared, Request
from bridge.verify.verdict import Provenance


def tensor_digest(tensor: torch.Tensor) -> str:
    """Hash of dtype, shape, strides and bits: "bfloat16[8, 5120]:4f3c..." (xxh3, 128 bits)."""
    # A size-1 axis may keep any stride through contiguous(); a clone does not.
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    plain = flat.view(torch.uint8)
    digest = xxhash.xxh3_128(repr((tuple(tensor.shape), tensor.stride())).encode())
    digest.update(plain.numpy().data)
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{name}{list(tensor.shape)}:{digest.hexdigest()}"


def case_digests(case: Case) -> tuple[str, ...]:
    """One digest per input, then one per upstream gradient."""
    return tuple(tensor_digest(tensor) for tensor in (*case.inputs, *case.grad_outputs))


def make_provenance(loaded: LoadedSpec, request: Request) -> Provenance:
    """Where the verdict comes from, stamped with the present time (UTC)."""
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=request.command,
        versions=package_versions(),
        device=device_name(),
        kernel_file=None if loaded.file is None else str(loaded.file),
        kernel_sha256=loaded.sha256,
        capture=request.capture,
        seed=request.seed,
        interpreter=registry.interpreting(),
        request=msgspec.to_builtins(_findable(request, loaded)),
    )


def _findable(request: Request, loaded: LoadedSpec) -> Request:
    """The request with absolute paths, so that it can be asked again from another folder."""
    kernel = request.kernel
    if kernel is not None and loaded.file is not None:
        attribute = kernelfile.split_source(kernel)[1]
        kernel = f"{loaded.file}:{attribute}" if attribute else str(loaded.file)
    capture = None if request.capture is None else str(Path(request.capture).resolve())
    return msgspec.structs.replace(request, kernel=kernel, capture=capture, command=())


def declare(
    loaded: LoadedSpec, request: Request, digests: Mapping[str, tuple[str, ...]], provenance: Provenance
) -> Declared:
    """Everything that must be fixed before the target runs; digests: of every case, by name."""
    return Declared(
        op=loaded.spec.name,
        constants=request.constants.over(constants_of(loaded.spec)),
        provenance=provenance,
        cases=tuple(digests),
        input_digests=dict(digests),
    )
