"""Find a KernelSpec by name, by file or by installed plugin. Importing this module loads no torch."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from bridge.errors import SpecError, UsageError, near_misses
from bridge.verify import kernelfile
from bridge.verify.spec import KernelSpec

#: Entry-point group of kernels that other distributions install: `name = "package.module:SPEC"`.
GROUP = "bridge.kernels"

Origin = Literal["built-in", "entry point", "file", "object", "override", "functions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSpec:
    """A spec and where it came from; file and sha256 go into the verdict's provenance."""

    spec: KernelSpec
    source: str  #: what loads it again: a name or FILE[:SPEC]
    origin: Origin
    file: Path | None = None
    sha256: str | None = None


def built_in_names() -> tuple[str, ...]:
    """Names of the built-in kernels, found without importing one."""
    import bridge.kernels

    folders = [folder for root in bridge.kernels.__path__ for folder in Path(root).iterdir()]
    return tuple(sorted(folder.name for folder in folders if (folder / "spec.py").is_file()))


def entry_points() -> dict[str, metadata.EntryPoint]:
    """Installed kernels by name, without importing one."""
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def known_names() -> tuple[str, ...]:
    """Everything `--op` can take without `--kernel`, for completion and for near misses."""
    return tuple(sorted({*built_in_names(), *entry_points()}))


def load_spec(source: str, *, op: str | None = None) -> LoadedSpec:
    """Load a KernelSpec.

    Args:
        source: a built-in or installed name, or a kernel file as FILE or FILE:SPEC.
        op: with a file that holds several specs, the name of the wanted one.

    Raises:
        UsageError: no such name; lists near misses.
        SpecError: the spec or its file does not fit the contract; names file, field and expectation.
    """
    if looks_like_file(source):
        prepare_triton()
        spec, path = kernelfile.load_file(source, name=op)
        return LoadedSpec(
            spec=spec,
            source=source,
            origin="file",
            file=path.resolve(),
            sha256=kernelfile.source_digest([path]),
        )
    if source in built_in_names():
        return _load_built_in(source)
    points = entry_points()
    if source in points:
        return _load_entry_point(points[source])
    raise UsageError(
        f"unknown op {source!r}; {near_misses(source, known_names())} A kernel of your own: --kernel FILE"
    )


def looks_like_file(source: str) -> bool:
    """Whether the source is meant as a path rather than as a name."""
    path, _ = kernelfile.split_source(source)
    return path.suffix == ".py" or os.sep in source or path.is_file()


def _load_built_in(name: str) -> LoadedSpec:
    prepare_triton()
    module = f"bridge.kernels.{name}.spec"
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UsageError(f"op {name!r} needs triton; pip install 'numerics-bridge[triton]'") from None
    spec = _expect_spec(getattr(loaded, "SPEC", None), f"{module}:SPEC")
    file = Path(loaded.__file__ or "")
    return LoadedSpec(
        spec=spec,
        source=name,
        origin="built-in",
        file=file,
        sha256=kernelfile.source_digest(list(file.parent.glob("*.py"))),
    )


def _load_entry_point(point: metadata.EntryPoint) -> LoadedSpec:
    prepare_triton()
    dist = point.dist.name if point.dist is not None else "an unknown distribution"
    where = f"entry point {point.name} = {point.value} of {dist}"
    try:
        value = point.load()
    except Exception as error:
        raise SpecError(kernelfile.explain(error, where)) from error
    spec = _expect_spec(value, where)
    file = kernelfile.file_of(spec.target)
    sha256 = kernelfile.source_digest([file]) if file else None
    return LoadedSpec(spec=spec, source=point.name, origin="entry point", file=file, sha256=sha256)


def _expect_spec(value: Any, where: str) -> KernelSpec:
    if not isinstance(value, KernelSpec):
        raise SpecError(f"{where} must be a KernelSpec, got {type(value).__name__}")
    return value


def from_object(spec: KernelSpec) -> LoadedSpec:
    """Wrap a spec that the caller built; its file is the one that defines the target."""
    file = kernelfile.file_of(spec.target)
    sha256 = kernelfile.source_digest([file]) if file and file.is_file() else None
    return LoadedSpec(spec=spec, source=spec.name, origin="object", file=file, sha256=sha256)


def prepare_triton() -> None:
    """Let Triton kernels run: interpreted where there is no GPU.

    Triton decides when a kernel, its own library included, is decorated, so the switch must be set before
    triton is imported.

    Raises:
        UsageError: triton was imported for a GPU that is not there.
    """
    import torch

    if torch.cuda.is_available() or interpreting():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if "triton.language.standard" in sys.modules:
        raise UsageError(
            "no GPU here and triton was imported without TRITON_INTERPRET=1, so its kernels cannot run; "
            "set TRITON_INTERPRET=1 before the process starts"
        )


def interpreting() -> bool:
    """Whether Triton kernels of this process run in the interpreter; false when triton is not loaded."""
    standard = sys.modules.get("triton.language.standard")
    if standard is None:
        return False
    return type(getattr(standard, "sum", None)).__name__ == "InterpretedFunction"
