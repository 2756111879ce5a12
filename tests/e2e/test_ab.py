"""`bridge ab` and fault localisation on the real demo run of torchtitan."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

pytest.importorskip("torchtitan", reason="the demo run needs torchtitan")

from bridge.cli import run
from bridge.verify.diff_document import DiffDocument

SCRIPTS = Path(__file__).parents[2] / "scripts"
DEMO = Path(__file__).parents[2] / "bridge" / "demo" / "train.toml"
KERNEL = "bridge.kernels.offset_rmsnorm.override.offset_rmsnorm"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("bench_localisation", SCRIPTS / "bench_localisation.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize(
    "name",
    [
        "norm: fp16 offset",
        "norm: backward forgets the offset",
        "linear: tf32",
        "attention: not causal",
        "output truncated to bfloat16",
        "dropout of another seed",
        "one weight perturbed",
        "optimizer: eps",
        "the same run again",
        "linear: split K, every wo",
        "norm: halves, every ffn_norm",
        "attention by its plain formula",
        "kernel: store cuts off 16 bits",
        "kernel: gradient over its own input",
        "right kernel: RMSNorm",
        "right kernel: LayerNorm far from zero",
        "1 rank against 2 ranks",
    ],
)
def test_planted_changes_are_told_apart(harness: ModuleType, name: str) -> None:
    (change,) = [change for change in harness.all_changes() if change.name == name]
    (row,) = harness.run([change])
    assert row["tensors"], row
    assert row["digests"], row


def test_one_command_from_config_to_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    options = ["--override", KERNEL, "--step", "1", "--out", str(tmp_path / "ab"), "--report", str(report)]
    code = run(["ab", "--config", str(DEMO), *options])
    document = msgspec.json.decode((tmp_path / "diff.json").read_bytes(), type=DiffDocument)
    assert code == 0, capsys.readouterr()
    assert document.kind == "ab" and document.outcome == "SAME WITHIN ROUNDING"
    assert [verdict.op for verdict in document.verdicts] == ["offset_rmsnorm"]
    assert document.verdicts[0]
    assert document.coverage.by_match["module"] >= 5, "each fused norm stands for its eager ops"
    assert "offset_rmsnorm" in document.summary
    assert report.stat().st_size > 0


def test_a_broken_kernel_in_place_of_the_configs_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config's override claims the same modules: it is taken out of both runs, and that is said."""
    broken = "bridge.demo.broken_override.broken_offset_rmsnorm"
    options = ["--override", broken, "--step", "1", "--out", str(tmp_path / "ab")]
    code = run(["ab", "--config", str(DEMO), *options, "--report", str(tmp_path / "report.html")])
    said = capsys.readouterr()
    assert code == 1, said
    document = msgspec.json.decode((tmp_path / "diff.json").read_bytes(), type=DiffDocument)
    first = document.suspects[0]
    assert document.outcome == "DIVERGED"
    assert first.module == "norm", "the first norm that backward reaches"
    assert KERNEL in said.err and "taken out of both runs" in said.err
    assert any(note.what == "override" for note in document.mismatches)


def test_checkpoints_and_clashing_overrides_are_found_without_a_run(tmp_path: Path) -> None:
    from bridge.verify.ab_probe import probe

    for name in ("step-2", "step-10", "step-4.tmp", "notes"):
        (tmp_path / "dump" / "mine" / name).mkdir(parents=True)
        (tmp_path / "dump" / "mine" / name / ".metadata").write_text("")
    (tmp_path / "dump" / "mine" / "step-6").mkdir()
    config = tmp_path / "train.toml"
    config.write_text(
        '[train]\nmodule = "bridge.demo"\nconfig = "offset_decoder"\n[train.set]\n'
        f'"override.imports" = ["{KERNEL}"]\n"checkpoint.enable" = true\n'
        f'"checkpoint.folder" = "mine"\n"dump_folder" = "{tmp_path / "dump"}"\n'
    )
    broken = "bridge.demo.broken_override.broken_offset_rmsnorm"
    found = probe(config, [broken])
    assert found.checkpoints == (2, 10), "a folder without its metadata is no checkpoint yet"
    assert found.folder == str(tmp_path / "dump" / "mine")
    assert found.clashes == ((KERNEL, broken),)
