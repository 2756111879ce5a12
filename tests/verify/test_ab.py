"""The parts of `bridge ab` that need no training run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded import Options, decoder

from bridge.cli.ab import command
from bridge.config import BridgeConfig, CaptureConfig, TrainConfig, load_config
from bridge.errors import KernelError, RunError, UsageError
from bridge.report import render_text
from bridge.verify import ab, ab_runs
from bridge.verify.ab_probe import Probe, probe
from bridge.verify.ab_runs import run_child, trace_of
from bridge.verify.ab_sides import Sides, config_step, from_checkpoint, split_sides, without_clashes
from bridge.verify.diff import diff_captures
from bridge.verify.verdict import Verdict

KERNEL = "bridge.kernels.offset_rmsnorm.override.offset_rmsnorm"


def config(**settings: Any) -> BridgeConfig:
    return BridgeConfig(train=TrainConfig(module="bridge.demo", config="offset_decoder", set=settings))


def test_an_override_that_the_config_has_is_taken_from_the_baseline() -> None:
    sides = split_sides(config(**{"override.imports": ["a.b", KERNEL]}), [KERNEL])
    assert sides.baseline == {"override.imports": ["a.b"]}
    assert sides.candidate == {"override.imports": ["a.b", KERNEL]}


@pytest.mark.parametrize("name", ["script", "job"])
def test_a_run_without_torchtitans_settings_is_refused_before_anything_runs(name: str) -> None:
    other = BridgeConfig(train=TrainConfig(**{name: "train.py"}))
    with pytest.raises(UsageError, match="compare them with `bridge diff`"):
        split_sides(other, ["training.steps=3"])


def test_an_override_of_the_config_that_claims_the_same_is_taken_out_of_both_runs_and_said() -> None:
    sides = split_sides(config(**{"override.imports": ["a.b", KERNEL]}), ["my.norm"])
    found = without_clashes(sides, Probe(clashes=((KERNEL, "my.norm"),)))
    assert found.baseline == {"override.imports": ["a.b"]}
    assert found.candidate == {"override.imports": ["a.b", "my.norm"]}
    (note,) = found.notes
    assert KERNEL in note.meaning and "taken out of both runs" in note.meaning
    assert without_clashes(sides, Probe()) == sides


@pytest.mark.parametrize(
    ("steps", "last", "start"),
    [((2, 4, 6), 5, {"checkpoint.load_step": 4}), ((2, 4), 2, {"checkpoint.enable": False})],
)
def test_both_runs_start_from_the_nearest_checkpoint_before_the_step(
    steps: tuple[int, ...], last: int, start: dict[str, Any]
) -> None:
    sides = Sides(baseline={"x": 1}, candidate={"x": 2})
    found = from_checkpoint(sides, Probe(folder="dump/checkpoint", checkpoints=steps), last)
    assert found.baseline == {"x": 1, **start} and found.candidate == {"x": 2, **start}
    assert "dump/checkpoint" in found.notes[0].meaning
    assert from_checkpoint(sides, Probe(), last) == sides, "a run that loads none starts where it starts"


def test_settings_go_to_the_candidate_alone_and_keep_their_types() -> None:
    sides = split_sides(
        config(),
        [
            "optimizer.param_groups.0.optimizer_kwargs.lr=1e-3",
            "training.dtype=bfloat16",
            "compile.enable=true",
        ],
    )
    assert sides.baseline == {}
    assert sides.candidate == {
        "optimizer.param_groups.0.optimizer_kwargs.lr": 1e-3,
        "training.dtype": "bfloat16",
        "compile.enable": True,
    }


@pytest.mark.parametrize("overrides", [[], ["nonsense"], ["no spaces.here please"]])
def test_overrides_that_say_nothing_are_refused(overrides: list[str]) -> None:
    with pytest.raises(UsageError, match="--override"):
        split_sides(config(), overrides)


def figures(*values: float | None) -> dict[str, Any]:
    return {"steps": list(range(1, len(values) + 1)), "loss": list(values)}


def test_the_first_step_beyond_noise_is_found() -> None:
    base = figures(5.0, 4.9, 4.8, 4.7)
    trace = trace_of("loss", base, figures(5.0, 4.9001, 4.8, 4.7), figures(5.0, 4.9002, 4.85, 4.6))
    assert trace.first_step == 3
    assert trace.noise == pytest.approx(0.0001 / 4.9001)


def test_a_deterministic_run_that_differs_by_rounding_alone_does_not_part() -> None:
    base = figures(5.0, 4.9)
    assert trace_of("loss", base, base, figures(5.0, 4.9 * (1 + 1e-7))).first_step is None


def test_a_figure_that_becomes_nan_parts_there() -> None:
    base = figures(5.0, 4.9)
    assert trace_of("loss", base, base, figures(5.0, None)).first_step == 2


def test_a_failing_run_is_named_with_its_last_line() -> None:
    with pytest.raises(RunError, match=r"the candidate run failed \(exit 2\): there is no config"):
        run_child(["sh", "-c", "echo 'bridge: error: there is no config' >&2; exit 2"], "candidate")


#: A stand-in for a run: it tells its own id and that of what it started, then waits.
CHILD = """
import os, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {other.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""
#: A stand-in for `bridge ab`.
PARENT = """
import sys
from bridge.cli._signals import ending_signals_interrupt
from bridge.verify.ab_runs import run_child
try:
    with ending_signals_interrupt():
        run_child([sys.executable, "-c", sys.argv[1], sys.argv[2]], "baseline")
except KeyboardInterrupt:
    sys.exit(130)
"""


def ended(pid: int) -> bool:
    """Whether a process is gone, or a corpse that nobody has fetched yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "code", "whole_group"),
    [(signal.SIGTERM, 130, True), (signal.SIGHUP, 130, True), (signal.SIGKILL, -9, False)],
)
def test_a_run_ends_with_the_command_that_started_it(
    tmp_path: Path, number: signal.Signals, code: int, whole_group: bool
) -> None:
    told = tmp_path / "ids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(told)])
    wait_for(told.exists)
    child, grandchild = map(int, told.read_text().split())
    parent.send_signal(number)
    assert parent.wait() == code
    wait_for(lambda: ended(child))
    if whole_group:
        wait_for(lambda: ended(grandchild))
    elif not ended(grandchild):
        os.kill(grandchild, signal.SIGKILL)


def wait_for(there: Callable[[], bool]) -> None:
    for _ in range(1200):
        if there():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen within a minute")


def verdict(outcome: Any) -> Verdict:
    return Verdict(verdict=outcome, op="fused_norm", summary="grad_weight is 12 % off")


def test_a_failed_kernel_is_the_answer_even_when_the_runs_agree() -> None:
    document = diff_captures(decoder(Options()).run("A"), decoder(Options(norm="fused")).run("B"))
    assert document
    whole = ab.combine(document, (verdict("FAIL"),), ())
    assert whole.kind == "ab" and whole.outcome == "DIVERGED" and not whole
    assert whole.suspects[0].key == "layers.1.norm/op_0_fused_norm" and whole.suspects[0].verdict == "FAIL"
    assert "grad_weight is 12 % off" in whole.summary


def test_a_passed_kernel_and_what_was_covered_are_said() -> None:
    document = diff_captures(decoder(Options()).run("A"), decoder(Options(norm="fused")).run("B"))
    whole = ab.combine(document, (verdict("PASS"),), ())
    assert whole and "Verified: fused_norm PASS" in whole.summary
    assert whole.coverage.pairs == document.coverage.pairs


def test_a_kernel_that_runs_nowhere_does_not_lose_the_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **options: Any) -> Verdict:
        raise KernelError("the target of fused_norm must run on case 'a', got ImportError: no cutlass")

    monkeypatch.setattr("bridge.verify.api.verify_kernel", refuse)
    said: list[str] = []
    verdicts = ab.verify_kernels(["fused_norm"], Path("candidate"), sweep=False, say=said.append)
    assert len(said) == 2 and "not judged: the target of fused_norm must run" in said[1]
    document = diff_captures(decoder(Options()).run("A"), decoder(Options(norm="fused")).run("B"))
    whole = ab.combine(document, verdicts, ())
    assert whole.outcome == "INCONCLUSIVE" and "no cutlass" in whole.summary
    assert "no cutlass" in render_text(whole)


def test_tensors_are_wanted_of_suspects_and_of_what_was_fused(tmp_path: Path) -> None:
    document = diff_captures(decoder(Options()).run("A"), decoder(Options(norm="fused wrong")).run("B"))
    wanted = ab.tensors_wanted(document, tmp_path, ["offset_rmsnorm"])
    assert "layers.1.norm/*" in wanted and "offset_rmsnorm" in wanted


def test_the_runs_are_child_processes_that_differ_in_settings_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    monkeypatch.setattr(ab_runs, "run_child", lambda command, _name: commands.append(command))
    file = tmp_path / "train.toml"
    file.write_text('[train]\nmodule = "bridge.demo"\nconfig = "offset_decoder"\n')
    monkeypatch.setattr(ab, "new_names", lambda *_: set())
    sides = iter([decoder(Options()).run("A"), decoder(Options()).run("B")])
    runs = {"baseline": next(sides), "candidate": next(sides)}
    monkeypatch.setattr(ab, "diff_captures", lambda a, b, **_: diff_captures(runs[a.name], runs[b.name]))
    monkeypatch.setattr(ab, "ask", lambda *_: Probe())
    document = ab.ab_run(file, overrides=["training.steps=3"], out=tmp_path / "out")
    assert document.outcome == "IDENTICAL" and document.kind == "ab"
    assert len(commands) == 2, "nothing differs, so nothing is run again for tensors"
    assert commands[0][-4:] == ["--tensors", "none", "--ops", "*"]
    assert commands[1][-6:] == ["--tensors", "none", "--ops", "*", "--set", "training.steps=3"]


def test_an_override_that_replaced_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('[train]\nmodule = "bridge.demo"\nconfig = "offset_decoder"\n')
    monkeypatch.setattr(ab, "ask", lambda *_: Probe())
    monkeypatch.setattr(ab, "capture_child", lambda *_: None)
    monkeypatch.setattr(ab, "new_names", lambda *_: set())
    same = diff_captures(decoder(Options()).run("A"), decoder(Options()).run("B"))
    monkeypatch.setattr(ab, "diff_captures", lambda *_, **__: same)
    document = ab.ab_run(file, overrides=["my.norm"], out=tmp_path / "out")
    assert document and "the override replaced nothing" in document.summary
    assert "replaced nothing" not in ab.ab_run(file, overrides=["x=1"], out=tmp_path / "out").summary


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    file = tmp_path / "train.toml"
    file.write_text('[train]\nmodule = "bridge.demo"\nconfig = "offset_decoder"\n')
    return file


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "no_such_module.norm",
            "--override no_such_module.norm cannot be applied: ImportError.*no_such_module",
        ),
        ("my_mod.missing", "--override my_mod.missing cannot be applied: ValueError.*my_mod.missing"),
        ("torn.norm", "--override torn.norm cannot be applied: SyntaxError"),
        ("optimizer.lrr=1e-3", "--override 'optimizer.lrr': optimizer has no field 'lrr'"),
        ("training.steps=many", "--override 'training.steps'.*got 'many'"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused_without_a_run(
    demo: Path, override: str, said: str
) -> None:
    pytest.importorskip("torchtitan")
    (demo.parent / "my_mod.py").write_text("def norm(config):\n    return config\n")
    (demo.parent / "torn.py").write_text("def norm(:\n")
    sides = split_sides(load_config(demo), [override])
    with pytest.raises(UsageError, match=said):
        probe(demo, sides.wanted, {} if sides.wanted else sides.candidate)


def test_the_examples_of_the_help_can_be_applied(demo: Path) -> None:
    pytest.importorskip("torchtitan")
    examples = re.findall(r"bridge ab .*--override (\S+)", command.help or "")
    assert len(examples) >= 2
    for example in examples:
        sides = split_sides(load_config(demo), [example])
        probe(demo, sides.wanted, {} if sides.wanted else sides.candidate)


def test_overrides_are_checked_before_anything_runs(monkeypatch: pytest.MonkeyPatch, demo: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], name: str | None) -> None:
        commands.append(command)
        raise RunError("--override my.norm cannot be applied")

    monkeypatch.setattr(ab_runs, "run_child", run)
    with pytest.raises(RunError, match=r"^--override my.norm"):
        ab.ab_run(demo, overrides=["my.norm", "training.steps=3"], out=demo.parent / "out")
    (asked,) = commands
    assert asked[2] == "bridge.verify.ab_probe" and asked[-2:] == ['["my.norm"]', '{"training.steps":3}']


def test_an_op_of_the_config_that_one_run_lacks_is_a_note(
    monkeypatch: pytest.MonkeyPatch, demo: Path
) -> None:
    demo.write_text(demo.read_text() + '[capture]\nops = ["offset_rmsnorm", "aten::mm"]\n')
    monkeypatch.setattr(ab, "ask", lambda *_: Probe())
    monkeypatch.setattr(ab, "capture_child", lambda *_: None)
    monkeypatch.setattr(ab, "new_names", lambda *_: set())
    monkeypatch.setattr(ab, "present", lambda folder, ops: ops[1:] if folder.name == "candidate" else ops)
    same = diff_captures(decoder(Options()).run("A"), decoder(Options()).run("B"))
    monkeypatch.setattr(ab, "diff_captures", lambda *_, **__: same)
    said: list[str] = []
    document = ab.ab_run(demo, overrides=["my.norm"], out=demo.parent / "out", say=said.append)
    (note,) = [note for note in document.mismatches if note.what == "ops"]
    assert (note.a, note.b) == ("calls", "none")
    assert note.meaning == "[capture] ops offset_rmsnorm matches no call of the candidate"
    assert f"ops: {note.meaning}" in said


def test_a_window_in_the_config_needs_a_step() -> None:
    windowed = BridgeConfig(capture=CaptureConfig(step="3:5"))
    with pytest.raises(UsageError, match="--step N"):
        config_step(windowed)
    assert config_step(BridgeConfig()) == 1
