"""Finding specs: by name, by file, by plugin; and what is said when they do not fit."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from bridge.errors import SpecError, UsageError
from bridge.verify import kernelfile, registry

GOOD = """
from bridge.verify import KernelSpec

def f(x):
    return x

def sample(shape, dtype, generator, device):
    return (None,)

SPEC = KernelSpec(
    name="{name}", reference=f, target=f, sample=sample, inputs=("x",),
    kind="elementwise", shapes=((2, 2),), dtypes=("float32",),
)
"""


def write(folder: Path, text: str, name: str = "kernel.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_is_loaded_with_its_digest(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.format(name="mine"))
    loaded = registry.load_spec(str(path))
    assert (loaded.spec.name, loaded.origin, loaded.file) == ("mine", "file", path)
    assert loaded.sha256 is not None and len(loaded.sha256) == 64


def test_a_changed_file_of_the_same_size_and_time_is_loaded_anew(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.format(name="aaaa"))
    stat = path.stat()
    first = registry.load_spec(str(path))
    path.write_text(GOOD.format(name="bbbb"))
    import os

    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = registry.load_spec(str(path))
    assert (first.spec.name, second.spec.name) == ("aaaa", "bbbb")
    assert first.sha256 != second.sha256
    assert first.spec.target is not second.spec.target


def test_an_attribute_picks_one_of_several(tmp_path: Path) -> None:
    text = GOOD.format(name="one") + "OTHER = KernelSpec(**{**vars(SPEC), 'name': 'two'})\n"
    path = write(tmp_path, text)
    assert registry.load_spec(f"{path}:OTHER").spec.name == "two"
    assert registry.load_spec(str(path)).spec.name == "one"
    assert registry.load_spec(str(path), op="two").spec.name == "two"


def test_spec_wins_over_another_of_the_same_name(tmp_path: Path) -> None:
    text = GOOD.format(name="one").replace("SPEC =", "IMPORTED =") + "SPEC = KernelSpec(**vars(IMPORTED))\n"
    path = write(tmp_path, text + "LAST = SPEC\n")
    module = kernelfile.run_file(path)
    loaded, _ = kernelfile.load_file(str(path), name="one")
    assert module.IMPORTED is not module.SPEC
    assert loaded.name == "one" and loaded is sys.modules[loaded.target.__module__].SPEC  # type: ignore[attr-defined]


def test_a_neighbour_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path, "NAME = 'from a neighbour'\n", "neighbour_of_kernel.py")
    path = write(
        tmp_path, "from neighbour_of_kernel import NAME\n" + GOOD.format(name="x").replace('"x"', "NAME", 1)
    )
    assert registry.load_spec(str(path)).spec.name == "from a neighbour"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = (", "line 1: syntax error"),
        ("x = 1\n", "defines no SPEC"),
        ("SPEC = 3\n", "SPEC must be a KernelSpec, got int"),
        ("import no_such_module_here\n", "line 1: loading the kernel file raised ModuleNotFoundError"),
        (
            "def f():\n    raise ValueError('boom')\nf()\n",
            "line 2: loading the kernel file raised ValueError: boom",
        ),
        ("import sys; sys.exit(0)\n", "calls sys.exit"),
        (
            GOOD.format(name="x").replace("inputs=", "input="),
            "KernelSpec has no field `input`; did you mean inputs",
        ),
        (GOOD.format(name="x").replace('kind="elementwise",', ""), "lacks the required field `kind`"),
        (GOOD.format(name="x").replace("elementwise", "pointwise"), "KernelSpec field `kind` must be one of"),
        (GOOD.format(name="x").replace("((2, 2),)", "()"), "KernelSpec field `shapes` must not be empty"),
        (
            GOOD.format(name="x").replace("float32", "float31"),
            "KernelSpec field `dtypes` has 'float31'; did you mean",
        ),
        (
            GOOD.format(name="x").replace("target=f", "target=None"),
            "KernelSpec field `target` must be callable",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_file_and_field(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        registry.load_spec(str(path))
    message = str(caught.value)
    assert str(path) in message and expected in message
    assert "\n" not in message


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        registry.load_spec(str(tmp_path / "absent.py"))
    with pytest.raises(SpecError, match="is a folder"):
        registry.load_spec(str(tmp_path))
    path = write(tmp_path, GOOD.format(name="x"))
    with pytest.raises(SpecError, match=r"has no 'SPECS'.*SPEC"):
        registry.load_spec(f"{path}:SPECS")


def test_an_unknown_name_lists_near_misses() -> None:
    assert "offset_rmsnorm" in registry.built_in_names()
    with pytest.raises(UsageError, match="unknown op 'ofset_rmsnorm'; did you mean offset_rmsnorm"):
        registry.load_spec("ofset_rmsnorm")


def test_an_entry_point_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD.format(name="theirs"), "their_kernels.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = {
        "theirs": metadata.EntryPoint("theirs", "their_kernels:SPEC", registry.GROUP),
        "broken": metadata.EntryPoint("broken", "their_kernels:NOPE", registry.GROUP),
        "number": metadata.EntryPoint("number", "their_kernels:GROUP", registry.GROUP),
    }
    monkeypatch.setattr(registry, "entry_points", lambda: points)
    assert registry.load_spec("theirs").origin == "entry point"
    assert "theirs" in registry.known_names()
    with pytest.raises(SpecError, match="entry point broken = their_kernels:NOPE"):
        registry.load_spec("broken")


def test_names_are_known_without_torch_or_triton() -> None:
    code = (
        "import sys; from bridge.verify import registry; registry.known_names(); "
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a/b.py", ("a/b.py", None)),
        ("a/b.py:SPEC", ("a/b.py", "SPEC")),
        ("odd:name.py", ("odd:name.py", None)),
        ("C:thing", ("C:thing", None)),
    ],
)
def test_split_source(source: str, expected: tuple[str, str | None]) -> None:
    path, attribute = kernelfile.split_source(source)
    assert (str(path), attribute) == expected


def test_a_triton_imported_for_a_missing_gpu_is_named() -> None:
    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', None)\n"
        "import triton, torch\n"
        "from bridge.verify import registry\n"
        "try:\n"
        "    registry.prepare_triton()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "else:\n"
        "    print('fine', torch.cuda.is_available())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "UsageError" in done.stdout and "TRITON_INTERPRET=1 before" in done.stdout
    ) or "fine True" in done.stdout
