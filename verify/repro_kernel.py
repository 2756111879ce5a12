"""Where a written repro finds its kernel: facts for the script, and copies of files beside it."""

from __future__ import annotations

import shutil
import site
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.verify import kernelfile, registry
from bridge.verify.registry import LoadedSpec
from bridge.verify.request import Request

if TYPE_CHECKING:
    from bridge.verify.case import Case

#: Names that the folder of a repro needs for itself.
_TAKEN = ("repro.py", "test_repro.py")


def kernel_facts(loaded: LoadedSpec, request: Request, case: Case, out: Path) -> dict[str, Any]:
    """What the script must know to run the target of `case` without bridge choosing it."""
    if loaded.origin == "override":
        return _override(loaded.source, request, case)
    if loaded.origin == "functions":
        assert request.target_fn is not None and request.reference is not None
        facts = _function(request.target_fn, out)
        if request.target_fn.startswith("torch.ops."):
            # The twin's module is what registers the operator.
            facts["first"] = _function(request.reference, out)
        return {**facts, "by_name": True}
    if loaded.origin == "file":
        assert loaded.file is not None, "a spec loaded from a file knows it"
        _, attribute = kernelfile.split_source(request.kernel or loaded.source)
        return {**_copied(loaded.file, out), "spec": attribute or "SPEC"}
    if loaded.origin == "built-in":
        return {"module": f"bridge.kernels.{loaded.source}.spec", "spec": "SPEC"}
    module, _, attribute = registry.entry_points()[loaded.source].value.partition(":")
    return {"module": module, "spec": attribute or "SPEC"}


def needs(facts: Mapping[str, Any]) -> str:
    """What the script imports, in words."""
    if "override" in facts:
        return f"torch, torchtitan and {facts['module']}"
    if "function" in facts and "module" in facts and facts["module"] != "torch":
        return f"torch and {facts['module']}"
    return "torch and the kernel"


def _copied(file: Path, out: Path) -> dict[str, Any]:
    """A copy beside the script; what the file imports from its own folder is still found there."""
    copy = out / (f"kernel_{file.name}" if file.name in _TAKEN else file.name)
    if copy.resolve() != file.resolve():
        shutil.copyfile(file, copy)
    return {"file": copy.name, "path": [str(file.resolve().parent)]}


def _function(name: str, out: Path) -> dict[str, Any]:
    from bridge.verify.pair import import_longest

    path, attribute = kernelfile.split_source(name)
    if path.suffix == ".py" and attribute is not None:
        return {**_copied(Path(path), out), "function": attribute}
    module, parts = import_longest(name)
    return {"module": module.__name__, "function": ".".join(parts), "path": _roots(module)}


def _override(name: str, request: Request, case: Case) -> dict[str, Any]:
    from bridge.capture.store import load_capture
    from bridge.verify import auto

    assert request.capture is not None, "an override is judged on a capture"
    module = name.rpartition(".")[0]
    return {
        "override": name,
        "module": module,
        "path": _roots(sys.modules[module]),
        **auto.recipe(name, str(case.attrs["site"]), load_capture(request.capture)),
    }


def _roots(module: Any) -> list[str]:
    """The folder that a module was found in, where Python does not look by itself."""
    file = getattr(module, "__file__", None)
    if file is None:
        return []
    depth = len(module.__name__.split(".")) - (0 if Path(file).stem == "__init__" else 1)
    root = Path(file).resolve().parents[depth]
    known = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    return [] if any(Path(folder).resolve() == root for folder in known) else [str(root)]
