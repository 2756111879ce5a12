"""Load a kernel file by path, fresh each time, and say clearly what is wrong with it.

The module gets a name of its own, so that two versions of one file can live in one process, and its
source stays inspectable, which `@triton.jit` needs. Importing this module loads no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
import re
import sys
import traceback
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

from bridge.errors import SpecError, near_misses
from bridge.verify.spec import KernelSpec, field_names

_COUNTER = itertools.count(1)
_UNEXPECTED = re.compile(r"KernelSpec\.__init__\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"KernelSpec\.__init__\(\) missing \d+ required keyword-only arguments?: (.*)")


def split_source(source: str) -> tuple[Path, str | None]:
    """Split `FILE[:SPEC]`; a colon inside the path (a drive, say) stays part of it."""
    head, colon, tail = source.rpartition(":")
    if colon and tail.isidentifier() and (head.endswith(".py") or Path(head).is_file()):
        return Path(head), tail
    return Path(source), None


def load_file(source: str, *, name: str | None = None) -> tuple[KernelSpec, Path]:
    """Run the file and return its KernelSpec.

    Args:
        source: "kernel.py" or "kernel.py:OTHER"; without an attribute, `SPEC` or the only KernelSpec is used.
        name: picks the KernelSpec of that name where the file holds several.

    Raises:
        SpecError: the file is missing, does not run, or holds no KernelSpec that fits; names file and field.
    """
    path, attribute = split_source(source)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise SpecError(f"kernel file {path} {what}; expected a Python file with SPEC = KernelSpec(...)")
    module = run_file(path)
    found = {key: value for key, value in vars(module).items() if isinstance(value, KernelSpec)}
    if attribute is not None:
        return _named(module, attribute, path, found), path
    default = found.get("SPEC")
    # SPEC comes first: a file may import another spec of the same name to build its own from.
    if name is not None and (default is None or default.name != name):
        for spec in found.values():
            if spec.name == name:
                return spec, path
    if "SPEC" in vars(module):
        return _named(module, "SPEC", path, found), path
    if len(found) == 1:
        return next(iter(found.values())), path
    if not found:
        raise SpecError(f"{path} defines no SPEC; expected SPEC = KernelSpec(name=..., reference=..., ...)")
    names = ", ".join(sorted(found))
    raise SpecError(f"{path} has no SPEC but several KernelSpecs ({names}); write {path}:NAME")


def _named(module: types.ModuleType, attribute: str, path: Path, found: dict[str, KernelSpec]) -> KernelSpec:
    if attribute not in vars(module):
        raise SpecError(f"{path} has no {attribute!r}; KernelSpecs in it: {near_misses(attribute, found)}")
    value = vars(module)[attribute]
    if not isinstance(value, KernelSpec):
        raise SpecError(f"{path}: {attribute} must be a KernelSpec, got {type(value).__name__}")
    return value


def see_folder() -> None:
    """Let modules of the current folder be imported by name; at the end of `sys.path` they shadow nothing."""
    try:
        here = str(Path.cwd())
    except OSError:
        return  # It was removed meanwhile, and holds nothing any more.
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def run_file(path: Path) -> types.ModuleType:
    """Execute a Python file as a new module, bypassing byte-code caches.

    Its folder goes to the end of `sys.path`: a helper beside it can be imported, and nothing is shadowed.
    """
    path = path.resolve()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"kernel file {path} cannot be read: {error}") from None
    linecache.checkcache(str(path))
    name = f"bridge_kernel_{path.stem}_{next(_COUNTER)}".replace("-", "_").replace(".", "_")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    module.__spec__ = ModuleSpec(name, None, origin=str(path))
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # dataclasses and pickles of the file look their module up by name.
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    except (KeyboardInterrupt, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, SystemExit):
            text = f"{path} calls sys.exit while being loaded; put script code under `if __name__ == ...`"
            raise SpecError(text) from None
        raise
    except BaseException as error:
        del sys.modules[name]
        raise SpecError(explain(error, str(path), _line_in(error, path))) from error
    return module


def _line_in(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f" line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f" line {lines[-1]}" if lines else ""


def explain(error: BaseException, where: str, line: str = "") -> str:
    """One line that says what building a KernelSpec, or loading its file, ran into."""
    text = str(error)
    if isinstance(error, SpecError):
        return f"{where}{line}: {text}"
    unexpected = _UNEXPECTED.search(text)
    if unexpected:
        field = unexpected.group(1)
        return f"{where}{line}: KernelSpec has no field `{field}`; {near_misses(field, field_names())}"
    missing = _MISSING.search(text)
    if missing:
        fields = missing.group(1).replace("'", "`")
        return f"{where}{line}: KernelSpec lacks the required field {fields}; see docs/kernel-spec.md"
    if isinstance(error, TypeError) and "KernelSpec.__init__() takes 1 positional" in text:
        return f"{where}{line}: KernelSpec takes keyword arguments only: KernelSpec(name=..., ...)"
    if isinstance(error, SyntaxError):
        return f"{where}{line}: syntax error: {error.msg}"
    return f"{where}{line}: loading the kernel file raised {type(error).__name__}: {text or 'no message'}"


def source_digest(paths: list[Path]) -> str:
    """SHA-256 over the contents of the files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def file_of(function: Callable[..., object]) -> Path | None:
    """The source file that defines a callable, through wrappers; None for builtins."""
    import inspect

    try:
        found = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        found = inspect.getsourcefile(type(function))
    except (OSError, ValueError):
        return None
    return Path(found) if found else None
