"""`bridge verify` on the command line: one line for bad input, and what a damaged capture still gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from scale_cli import KERNEL, refused, verdict_of

from bridge import cli


def test_unknown_ops_and_nothing_to_judge(capfd: pytest.CaptureFixture[str], kernel: Path) -> None:
    assert "did you mean offset_rmsnorm" in refused(capfd, "--op", "ofset_rmsnorm")
    assert "nothing to judge" in refused(capfd)
    assert "name the capture with --from" in refused(capfd, "--kernel", kernel, "--no-sweep")
    assert "name the capture with --from" in refused(capfd, "--kernel", kernel, "--target", "recorded")
    assert "--fudge-factor must be" in refused(capfd, "--kernel", kernel, "--fudge-factor", "0.5")
    assert "leave out --jobs" in refused(capfd, "--kernel", kernel, "--jobs", "2")
    assert "--shape must be sizes" in refused(capfd, "--kernel", kernel, "--shape", "axb")
    assert "--shape must be sizes" in refused(capfd, "--kernel", kernel, "--shape", "3x")
    assert "--op 'nope'" in refused(capfd, "--kernel", kernel, "--op", "nope")


def test_folders_that_are_no_capture(capfd: pytest.CaptureFixture[str], folder: Path, kernel: Path) -> None:
    assert "does not exist" in refused(capfd, "--kernel", kernel, "--from", "absent")
    sources = folder / "capture"
    sources.mkdir()
    (sources / "api.py").write_text("x = 1\n")
    assert "is not a capture" in refused(capfd, "--kernel", kernel, "--from", sources)
    (folder / "empty").mkdir()
    assert "is not a capture" in refused(capfd, "--kernel", kernel, "--from", "empty")
    assert "is not a capture" in refused(capfd, "--kernel", kernel, "--from", kernel)


@pytest.fixture
def copy(captured: Path, folder: Path) -> Path:
    """A copy of the capture, to be damaged."""
    return Path(shutil.copytree(captured, folder / "damaged"))


def test_a_torn_capture_is_refused_and_judged_on_request(
    capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path, folder: Path
) -> None:
    manifest = copy / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "complete": False, "ranks": []}))
    assert "--partial" in refused(capfd, "--kernel", kernel, "--from", copy)
    arguments = [
        "verify",
        "--kernel",
        str(kernel),
        "--from",
        str(copy),
        "--no-sweep",
        "--partial",
        "--in-process",
    ]
    assert cli.run(arguments) == 0
    assert any("partial" in text for text in verdict_of(folder)["coverage"]["not_covered"])


def test_a_manifest_cut_short(capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path) -> None:
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    assert "manifest.json" in refused(capfd, "--kernel", kernel, "--from", copy)


def test_a_capture_without_calls(capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path) -> None:
    manifest = copy / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "ranks": []}))
    shutil.rmtree(copy / "rank_00000")
    assert "holds no calls" in refused(capfd, "--kernel", kernel, "--from", copy)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_tensors(capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path, damage: str) -> None:
    (shard,) = copy.glob("rank_00000/*.safetensors")
    data = bytearray(shard.read_bytes())
    if damage == "truncate":
        del data[-40:]
    else:
        data[-9] ^= 0xFF
    shard.write_bytes(data)
    assert shard.name in refused(capfd, "--kernel", kernel, "--from", copy)


def test_specs_that_do_not_fit(
    capfd: pytest.CaptureFixture[str], captured: Path, folder: Path, kernel: Path
) -> None:
    for old, new, expected in (
        ('inputs=("x", "weight")', 'input=("x", "weight")', "no field `input`"),
        ('grads=("x", "weight")', 'grads=("x", "bias")', "field `grads` names 'bias'"),
        (
            'inputs=("x", "weight")',
            'inputs=("x", "weight", "bias")',
            "nothing for bias; give the spec a `bind`",
        ),
        ('sites=("Scaled",)', 'sites=("Scale",)', "did you mean Scaled?"),
        ('dtypes=("float32",)', 'dtypes=("float16",)', "dtype float32 is not declared (declared: float16)"),
        ("shapes=((4, 16), (3, 7))", "shapes=((2, 4, 16),)", "than the declared shapes give: (2, 4, 16)"),
    ):
        text = KERNEL.replace(old, new)
        assert text != KERNEL
        kernel.write_text(text)
        assert expected in refused(capfd, "--kernel", kernel, "--from", captured)
    assert "does not exist" in refused(capfd, "--kernel", "absent.py")
    kernel.write_text(KERNEL)
    assert "does not declare dtype 'float16'" in refused(capfd, "--kernel", kernel, "--dtype", "float16")
    assert "does not declare shapes like (2, 2, 2)" in refused(capfd, "--kernel", kernel, "--shape", "2x2x2")


def test_a_kernel_that_raises(capfd: pytest.CaptureFixture[str], captured: Path, kernel: Path) -> None:
    kernel.write_text(
        KERNEL.replace("    return Scale.apply(x, weight)", "    raise ValueError('not today')")
    )
    err = refused(capfd, "--kernel", kernel, "--from", captured, isolated=True)
    assert "ValueError: not today" in err and "captured 0" in err
    kernel.write_text(KERNEL.replace("x * w, mask=i < n", "x * undefined_name, mask=i < n"))
    assert "undefined_name" in refused(capfd, "--kernel", kernel)


def test_a_refusal_leaves_the_last_report(captured: Path, kernel: Path, folder: Path) -> None:
    arguments = ["verify", "--kernel", str(kernel), "--from", str(captured), "--no-sweep", "--in-process"]
    assert cli.run(arguments) == 0
    before = (folder / "report.html").read_bytes(), (folder / "verdict.json").read_bytes()
    kernel.write_text(
        KERNEL.replace("    return Scale.apply(x, weight)", "    raise ValueError('not today')")
    )
    assert cli.run(arguments) == 2
    assert before == ((folder / "report.html").read_bytes(), (folder / "verdict.json").read_bytes())


@pytest.mark.parametrize("name", ["calls", "contents"])
def test_a_file_cut_under_a_finished_manifest(
    capfd: pytest.CaptureFixture[str], kernel: Path, copy: Path, folder: Path, name: str
) -> None:
    file = copy / "rank_00000" / f"{name}.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    first = next((n for n, line in enumerate(lines, 1) if b'"op":"Scaled"' in line), len(lines) - 2)
    kept = lines[:first]
    file.write_bytes(b"".join(kept) + lines[len(kept)][:20])
    err = refused(capfd, "--kernel", kernel, "--from", copy)
    assert f"{name}.jsonl was changed" in err and "--partial" in err
    arguments = ["--kernel", str(kernel), "--from", str(copy), "--partial", "--quick", "--in-process"]
    assert cli.run(["verify", *arguments]) == 0
    left_out = verdict_of(folder)["coverage"]["not_covered"]
    assert any(f"{name}.jsonl was changed after the capture" in text for text in left_out)
    if name == "calls":
        assert any(f"damaged: {first} of" in text for text in left_out)


def test_target_takes_the_name_of_a_function(capfd: pytest.CaptureFixture[str], captured: Path) -> None:
    """As --target-fn; anything else than a name, kernel or recorded is refused."""
    pair = ("--reference", "math.sqrt", "--target")
    assert "no_such_module" in refused(capfd, *pair, "no_such_module.f", "--from", captured)
    assert "kernel, recorded or the dotted name" in refused(capfd, "--op", "rope", "--target", "eager")
    assert "beside --target-fn math.log" in refused(capfd, *pair, "math.exp", "--target-fn", "math.log")
