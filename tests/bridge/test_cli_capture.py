"""`bridge capture`: what the command line hands to `capture_run`, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import bridge.capture.api
from bridge.capture.request import CaptureResult, size
from bridge.cli import run
from bridge.config import BridgeConfig

RESULT = CaptureResult(
    path=Path("capture"), step=100, steps=(100,), calls=1234, calls_with_tensors=35, stored_bytes=1536,
    kernels=("offset_rmsnorm",), metrics={"loss": 2.5, "grad_norm": None}, dropped=2,
    problems=("half of it",),
)  # fmt: skip


class Called(dict[str, Any]):
    """Arguments of the one call of `capture_run`."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    seen = Called()

    def capture_run(config: Any, **more: Any) -> CaptureResult:
        seen.update(more, config=config)
        print("the script prints")
        more["say"]("one\nline")
        return RESULT

    monkeypatch.setattr(bridge.capture.api, "capture_run", capture_run)
    return seen


def test_arguments_reach_the_library(called: Called) -> None:
    code = run(
        [
            *(
                "capture",
                "--step",
                "90:110",
                "--config",
                "t.toml",
                "--out",
                "o",
                "--ops",
                "a,b",
                "--ops",
                "c",
            ),
            *("--modules", "m*", "--tensors", "inputs", "--phases", "forward", "--ranks", "0,3"),
            *("--max-bytes", "2 KiB", "--on", "nonfinite", "--set", "a.b=3", "--set", "c.d=word", "--force"),
            *("--set", 'e.f=["x"]', "--continue", "--eager", "-v", "--replace", "torch.nn.RMSNorm=rms_norm"),
        ]
    )
    assert code == 0
    called.pop("say"), called.pop("progress")
    assert called == {
        "config": Path("t.toml"), "step": "90:110", "out": Path("o"), "ops": ("a", "b", "c"),
        "modules": ("m*",),
        "tensors": "inputs", "phases": ("forward",), "ranks": (0, 3), "budget_bytes": 2048, "on": "nonfinite",
        "settings": {"a.b": 3, "c.d": "word", "e.f": ["x"]}, "force": True, "stop": False, "verbose": True,
        "replace": {"torch.nn.RMSNorm": "rms_norm"}, "against": None, "first": 8,
        "eager": True,
    }  # fmt: skip


def test_everything_after_the_dashes_is_the_script(called: Called) -> None:
    assert run(["capture", "--step", "3", "--", "train.py", "--step", "9", "-v", "--", "x"]) == 0
    config = called["config"]
    assert isinstance(config, BridgeConfig)
    assert (config.train.script, config.train.args) == ("train.py", ("--step", "9", "-v", "--", "x"))
    assert called["step"] == "3"
    assert called["verbose"] is False


def test_text_ends_with_the_next_command(called: Called, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "--step", "100"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "the script prints",
        "capture/  step 100  loss 2.5",
        "  1,234 calls, 35 with tensors, 1.5 KiB",
        "  2 tensors were dropped; `bridge inspect capture` lists them",
        "  problem: half of it",
        "next: bridge verify --op offset_rmsnorm --from capture/",
    ]
    assert err == "bridge: one line\n"


def test_json_has_stdout_to_itself(called: Called, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "--step", "100", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["path"] == "capture"
    assert document["metrics"] == {"loss": 2.5, "grad_norm": None}
    assert "the script prints" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "a.toml", "--", "b.py"], "either --config FILE or -- SCRIPT.py"),
        (["--set", "a.b=1", "--", "b.py"], "--set needs a torchtitan config"),
        (["--set", "nothing"], "KEY=VALUE"),
        (["--replace", "RMSNorm"], "CLASS=KERNEL"),
        (["--ranks", "a"], "--ranks takes numbers"),
        (["--max-bytes", "lots"], "--max-bytes must be a positive size"),
        (["--tensors", "some"], "some"),
        (["--on", "monday"], "monday"),
        (["extra"], "extra"),
    ],
)
def test_bad_arguments_exit_2(
    called: Called, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert run(["capture", "--step", "1", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not called


def test_other_ranks_keep_quiet(
    called: Called, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(["capture", "--step", "1"]) == 0
    assert "capture/" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_a_capture_that_kept_nothing_of_what_was_asked_for_exits_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emptied = msgspec.structs.replace(
        RESULT, calls_with_tensors=0, stored_bytes=0, problems=(), dropped_because="the disk has 9 bytes free"
    )
    monkeypatch.setattr(bridge.capture.api, "capture_run", lambda *arguments, **more: emptied)
    assert run(["capture", "--step", "3"]) == 3
    out, err = capsys.readouterr()
    assert "0 with tensors" in out
    assert (
        err.count("\n") == 1 and "all 2 that were asked for were dropped (the disk has 9 bytes free)" in err
    )


@pytest.mark.parametrize("name", ["script", "job"])
def test_settings_need_a_config_that_has_them(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "train.toml"
    config.write_text(f'[train]\n{name} = "absent"\n')
    assert run(["capture", "--step", "3", "--config", str(config), "--set", "training.steps=9"]) == 2
    assert "--set needs torchtitan 0.3's config" in capsys.readouterr().err
