"""Any script as a run: steps are counted, models found, captures right, and the script stays as it is."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from bridge.capture import capture_run, load_capture
from bridge.capture.request import CaptureResult
from bridge.capture.script import find_models
from bridge.config import BridgeConfig, CaptureConfig, TrainConfig
from bridge.errors import (
    CaptureError,
    ConfigError,
    NotACaptureError,
    RunError,
    StepNotReachedError,
    UsageError,
)

LOOP = """
    import sys
    import torch

    torch.manual_seed(0)
    steps, jump = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = (model(torch.randn(64, 8)) - 1).pow(2).mean()
        if step == 14:
            loss = loss * jump
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(LOOP), encoding="utf-8")
    return path


def capture(
    script: Path, *args: str, step: int | str | None, out: str = "out", **more: object
) -> CaptureResult:
    config = BridgeConfig(train=TrainConfig(script=str(script), args=args))
    return capture_run(config, step=step, out=script.parent / out, **more)  # type: ignore[arg-type]


def write(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.mark.parametrize("step", [1, 3])
def test_one_step_of_a_plain_loop(script: Path, step: int) -> None:
    argv, path = list(sys.argv), list(sys.path)
    result = capture(script, "5", step=step, ops=["*"])
    assert (sys.argv, sys.path) == (argv, path)
    found = load_capture(result.path)
    assert found.complete
    assert found.manifest.config == {"script": str(script), "args": ["5"]}
    assert [c.module for c in found.calls if c.kind == "module"] == ["", "0", "1", "2"]
    assert {call.phase for call in found.calls} >= {"forward", "backward", "optimizer"}
    (norm,) = found.find("RMSNorm")
    tensors = found.tensors(norm)
    expected = torch.nn.functional.rms_norm(tensors["inputs/0"], (8,), tensors["params/weight"])
    torch.testing.assert_close(tensors["outputs/0"], expected)


def test_the_loss_and_gradient_norm_are_those_of_the_step(script: Path) -> None:
    result = capture(script, "3", step=2)
    namespace: dict[str, object] = {"__name__": "__main__"}
    sys.argv, before = [str(script), "2"], sys.argv
    try:
        exec(compile(script.read_text(), str(script), "exec"), namespace)
    finally:
        sys.argv = before
    assert result.metrics["loss"] == namespace["losses"][1]  # type: ignore[index]
    grads = [p.grad for p in namespace["model"].parameters()]  # type: ignore[attr-defined]
    norm = torch.nn.utils.get_total_norm(grads)
    assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)


def test_captured_tensors_are_what_forward_hooks_saw(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 1))
        seen = {}
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda m, i, o, name=name: seen.__setitem__(name, (i[0].detach().clone(), o.detach().clone()))
            )
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            seen.clear()
            model(torch.randn(5, 4)).sum().backward()
            if step == 2:
                torch.save(seen, __file__ + ".seen")
            optimizer.step()
        """,
    )
    result = capture(script, step=3, ops=["*"])
    seen = torch.load(f"{script}.seen")
    found = load_capture(result.path)
    for name, (given, returned) in seen.items():
        (call,) = [c for c in found.calls if c.kind == "module" and c.module == name]
        assert torch.equal(found.tensor(call.inputs[0]), given)
        assert torch.equal(found.tensor(call.outputs[0]), returned)


def test_accumulated_microbatches_are_one_step(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            for microbatch in range(3):
                model(torch.randn(2, 4)).mean().backward()
            optimizer.step()
        """,
    )
    found = load_capture(capture(script, step=2).path)
    assert [c.microbatch for c in found.calls if c.kind == "module"] == [0, 1, 2]


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import torch
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            second(first(torch.randn(2, 4))).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        """,
    )
    found = load_capture(capture(script, step=3).path)
    assert len([c for c in found.calls if c.kind == "module"]) == 2
    assert found.manifest.complete


def test_the_model_is_found_through_wrappers() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2))

    model = Outer()
    wrapped = torch.nn.DataParallel(model)
    assert find_models(list(wrapped.parameters())) == [model]
    other = torch.nn.Linear(2, 2)
    assert find_models(list(other.parameters())) == [other]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("import torch\n", StepNotReachedError, "ended without an optimizer step"),
        ("import torch\nraise ValueError('no data')\n", RunError, r"failed in step 1: ValueError: no data"),
        ("import sys\nsys.exit(3)\n", RunError, "exited with 3"),
        ("def f(:\n", RunError, "SyntaxError"),
    ],
)
def test_a_script_that_does_not_train(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        capture(write(tmp_path, text), step=2)
    assert not (tmp_path / "out").exists()


def test_no_such_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no training script"):
        capture(tmp_path / "nothing.py", step=2)


def test_a_script_that_raises_in_the_captured_step_leaves_its_record(tmp_path: Path) -> None:
    text = textwrap.dedent(LOOP).replace(
        "    optimizer.step()\n", "    optimizer.step() if step < 3 else 1 / 0\n"
    )
    with pytest.raises(RunError, match=r"captured step: ZeroDivisionError.*what had been recorded is in"):
        capture(write(tmp_path, text), "5", step=3)
    found = load_capture(tmp_path / "out")
    assert not found.complete
    assert "ZeroDivisionError" in " ".join(found.problems)
    assert {call.phase for call in found.calls} >= {"forward", "backward"}


def test_a_window_keeps_digests_of_all_steps_and_tensors_of_one(script: Path) -> None:
    result = capture(script, "9", step="2:5@3", ops=["*"])
    found = load_capture(result.path)
    assert (result.step, result.steps) == (3, (2, 3, 4, 5))
    assert found.complete
    with_tensors = {call.step for call in found.calls for r in call.outputs if r.blob is not None}
    assert with_tensors == {3}
    digests = {(c.step, c.key): c.outputs[0].digest for c in found.calls if c.kind == "module"}
    single = load_capture(capture(script, "9", step=4, out="single").path)
    for call in single.calls:
        if call.kind == "module":
            assert digests[4, call.key] == call.outputs[0].digest


def test_a_window_that_the_run_does_not_fill_keeps_what_there_is(script: Path) -> None:
    with pytest.raises(StepNotReachedError, match=r"within steps 3:9; steps 3 to 5 were recorded"):
        capture(script, "5", step="3:9")
    assert {call.step for call in load_capture(script.parent / "out").calls} >= {3, 4, 5}


@pytest.mark.parametrize(
    ("on", "factor", "reason"), [("nonfinite", "nan", "loss is nan"), ("loss-jump", "50", "above")]
)
def test_a_trigger_keeps_the_step_at_which_it_fires(script: Path, on: str, factor: str, reason: str) -> None:
    result = capture(script, "20", factor, step=None, on=on, ops=["RMSNorm"])
    assert result.step == 14
    assert reason in str(result.trigger)
    assert sorted(path.name for path in script.parent.iterdir()) == ["out", "train.py"]
    found = load_capture(result.path)
    assert found.complete
    assert found.tensor(found.find("RMSNorm")[0].inputs[0]).shape == (64, 8)


def test_a_trigger_looks_at_the_whole_run_whatever_step_the_config_names(script: Path) -> None:
    config = BridgeConfig(
        train=TrainConfig(script=str(script), args=("20", "nan")),
        capture=CaptureConfig(step=2, ops=("RMSNorm",)),
    )
    assert capture_run(config, on="nonfinite", out=script.parent / "out").step == 14


def test_all_tensors_of_no_calls_in_particular_are_those_of_every_call(script: Path) -> None:
    default = load_capture(capture(script, "3", step=2, out="default").path)
    config = BridgeConfig(
        train=TrainConfig(script=str(script), args=("3",)), capture=CaptureConfig(ops=("RMSNorm",))
    )
    everything = load_capture(capture_run(config, step=2, tensors="all", out=script.parent / "out").path)
    assert default.manifest.selection["patterns"] != ["*"]
    assert everything.manifest.selection["patterns"] == ["*"]


def test_a_trigger_that_never_fires_leaves_nothing(script: Path) -> None:
    with pytest.raises(StepNotReachedError, match="nonfinite did not happen from step 2 to 6"):
        capture(script, "6", step="2:", on="nonfinite")
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_an_older_capture_survives_a_run_that_falls_short(script: Path) -> None:
    capture(script, "5", step=2)
    with pytest.raises(CaptureError, match="--force"):
        capture(script, "5", step=3)
    with pytest.raises(StepNotReachedError):
        capture(script, "5", step=6, force=True)
    assert load_capture(script.parent / "out").manifest.step == 2
    capture(script, "5", step=3, force=True)
    assert load_capture(script.parent / "out").manifest.step == 3
    assert sorted(path.name for path in script.parent.iterdir()) == ["out", "train.py"]


def test_a_folder_of_somebody_elses_is_refused_before_the_script_runs(script: Path) -> None:
    (script.parent / "out").mkdir()
    (script.parent / "out" / "notes.txt").write_text("mine")
    script.write_text("raise SystemExit('it ran')")
    with pytest.raises(NotACaptureError, match=r"notes\.txt"):
        capture(script, step=2, force=True)


def test_the_script_goes_on_when_asked(script: Path) -> None:
    script.write_text(script.read_text() + "\nopen(__file__ + '.done', 'w').write(str(len(losses)))\n")
    capture(script, "6", step=2, stop=False)
    assert Path(f"{script}.done").read_text() == "6"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"step": None}, "which step"),
        ({"step": "4:2"}, "ends before it starts"),
        ({"step": 2, "on": "monday"}, "nonfinite or loss-jump"),
        ({"step": 2, "phases": ["sideways"]}, "forward, recompute"),
        ({"step": 2, "ops": ["RMSNrm"]}, "did you mean RMSNorm"),
    ],
)
def test_requests_that_cannot_be_served(script: Path, more: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        capture(script, "5", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("older", [False, True])
def test_a_full_disk_is_not_the_scripts_fault(older: bool, script: Path, small_disk: Path) -> None:
    config = BridgeConfig(train=TrainConfig(script=str(script), args=("5",)))
    if older:
        capture_run(config, step=1, out=small_disk / "c")
    with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(CaptureError, match=r"cannot write the capture .*No space left on device.*--out"):
        capture_run(config, step=3, out=small_disk / "c", force=older)
    if older:
        assert load_capture(small_disk / "c").manifest.step == 1


@pytest.mark.parametrize("step", ["abc", "9:2", 0])
def test_a_step_of_the_config_is_reported_as_its_key(step: int | str, script: Path) -> None:
    train = TrainConfig(script=str(script), args=("5",))
    config = BridgeConfig(train=train, capture=CaptureConfig(step=step), path="my.toml")
    with pytest.raises(UsageError, match=r"^my\.toml: capture\.step") as caught:
        capture_run(config, out=script.parent / "out")
    assert "--step" not in str(caught.value)
