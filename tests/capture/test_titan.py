"""Driving torchtitan: the run is the one it would be, and nothing of ours outlives it."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.capture import capture_run, load_capture
from bridge.capture.request import CaptureResult
from bridge.capture.select import Selection
from bridge.capture.steps import RunFacts, StepRecorder
from bridge.capture.tracer import Tracer
from bridge.capture.window import parse_window
from bridge.config import BridgeConfig, CaptureConfig, TrainConfig
from bridge.errors import ConfigError, RunError, StepNotReachedError, UsageError

titan = pytest.importorskip("torchtitan", reason="torchtitan is not installed")
from importlib import metadata  # noqa: E402

if not metadata.version("torchtitan").startswith("0.3."):
    pytest.skip("these configs are torchtitan 0.3's", allow_module_level=True)

from bridge.capture.settings import plain_settings  # noqa: E402
from bridge.capture.titan import run_titan  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def demo(folder: Path, **settings: Any) -> TrainConfig:
    """The demo's decoder with eager norms; it writes into `folder` alone."""
    return TrainConfig(
        module="bridge.demo",
        config="offset_decoder",
        set={"dump_folder": str(folder / "outputs"), **settings},
    )


class Spy(StepRecorder):
    """Records nothing; notes each step's loss and gradient norm, and the model."""

    def __init__(self, window: str, open_step: Any = None) -> None:
        super().__init__(parse_window(window), open_step or self._nothing)
        self.parts: Sequence[Any] = ()

    def attach(self, parts: Sequence[Any], facts: RunFacts) -> None:
        super().attach(parts, facts)
        self.parts, self.facts = parts, facts

    @contextmanager
    def _nothing(self, parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        yield

    def wants_metrics(self, step: int) -> bool:
        return True


def train(folder: Path, steps: str, **settings: Any) -> Spy:
    spy = Spy(steps)
    run_titan(demo(folder, **settings), spy, config_path=None)
    return spy


def parameters(spy: Spy) -> dict[str, torch.Tensor]:
    return {
        name: (p.to_local() if hasattr(p, "to_local") else p).detach().clone()
        for part in spy.parts
        for name, p in part.named_parameters()
    }


def llama3(folder: Path, **settings: Any) -> TrainConfig:
    """torchtitan's own debug model with selective activation checkpointing, on the demo's data."""
    import bridge.demo.config_registry as registry

    small = {
        "dump_folder": str(folder / "outputs"),
        "hf_assets_path": str(registry.ASSETS),
        "dataloader.dataset": "bridge_demo",
        "training.local_batch_size": 1,
        "training.seq_len": 32,
        "parallelism.spmd_backend": "partial_dtensor",
        "debug.seed": 1,
        "debug.enable_structured_logging": False,
        "comm.trace_buf_size": 0,
    }
    return TrainConfig(module="llama3", config="llama3_debugmodel", set={**small, **settings})


@pytest.mark.parametrize(
    ("make", "steps", "settings"),
    [
        (demo, 10, {}),
        (demo, 3, {"training.global_batch_size": 3, "training.mixed_precision_param": "bfloat16"}),
        (llama3, 2, {}),
    ],
    ids=["eager", "accumulated bf16", "activation checkpointing"],
)
def test_steps_are_bit_equal_with_and_without_capture(
    tmp_path: Path, make: Callable[..., TrainConfig], steps: int, settings: dict[str, Any]
) -> None:
    config = make(tmp_path, **{"metrics.log_freq": 1, **settings})
    plain = Spy(str(steps))
    run_titan(config, plain, config_path=None)

    @contextmanager
    def captured(parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        tracer = Tracer(
            list(parts),
            out=tmp_path / f"capture-{step}",
            step=step,
            selection=Selection(patterns=("*",) if step == steps else ()),
        )
        with tracer:
            yield
        tracer.finish()

    everything = Spy(f"1:{steps}", captured)
    run_titan(config, everything, config_path=None)

    assert len(plain.losses) == len(everything.losses) == steps
    assert plain.losses == everything.losses
    before, after = parameters(plain), parameters(everything)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = [load_capture(tmp_path / f"capture-{step}") for step in range(1, steps + 1)]
    assert all(capture.complete for capture in found), [capture.problems for capture in found]
    assert ("recompute" in {call.phase for call in found[-1].calls}) == (make is llama3)


def test_nothing_of_ours_outlives_the_run(tmp_path: Path) -> None:
    from torchtitan.tools import utils

    environment = dict(os.environ)
    device = (utils.device_type, utils.device_module)
    had_timeout = hasattr(torch.distributed, "set_timeout")
    train(tmp_path, "2")
    assert dict(os.environ) == environment
    assert (utils.device_type, utils.device_module) == device
    assert hasattr(torch.distributed, "set_timeout") == had_timeout
    assert gc.isenabled()
    assert torch.autograd.is_multithreading_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.distributed.is_initialized()


def test_settings_reach_the_trainer(tmp_path: Path) -> None:
    spy = train(tmp_path, "1", **{"model_spec.model.layers.0.attention_norm.eps": 0.5})
    norms = {n: m.eps for n, m in spy.parts[0].named_modules() if type(m).__name__ == "OffsetRMSNorm"}
    assert norms["layers.0.attention_norm"] == 0.5
    assert norms["layers.1.attention_norm"] == 1e-6
    assert spy.facts.seed == 0
    assert spy.facts.config["training"]["steps"] == 100


def test_flex_attention_is_replaced_on_a_cpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("FlexAttention runs on this machine")
    said: list[str] = []
    spy = Spy("1")
    spy._say = said.append
    run_titan(llama3(tmp_path), spy, config_path=None)
    assert "FlexAttention has no backward on CPU" in said[0]
    assert "6 places" in str(spy.facts.flags["attention"])
    assert math.isfinite(spy.losses[1][0] or math.nan)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"module": "lama3"}, ConfigError, r"'lama3' is no torchtitan model.*did you mean llama3"),
        ({"module": "bridge.demos"}, ConfigError, r"'bridge\.demos'"),
        (
            {"config": "offset_decodr"},
            ConfigError,
            r"'offset_decodr' is not in .*did you mean offset_decoder",
        ),
        (
            {"module": None, "config": None, "job": "job.toml"},
            ConfigError,
            r"job file of torchtitan 0\.2\.x.*llama3_8B",
        ),
        (
            {"set": {"override.imports": ["bridge.demo.nothing.here"]}},
            RunError,
            r"before its first step.*nothing",
        ),
        ({"set": {"hf_assets_path": "/nowhere"}}, RunError, r"before its first step.*nowhere"),
        ({"set": {"training.steps": 2}}, StepNotReachedError, r"trains for 2 steps, so step 3 never comes"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('[job]\n[model]\nname = "llama3"\nflavor = "8B"\n', encoding="utf-8")
    base = {"module": "bridge.demo", "config": "offset_decoder", "set": {}}
    with pytest.raises(error, match=message) as caught:
        run_titan(TrainConfig(**{**base, **change}), Spy("3"), config_path=None)
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_a_run_that_ends_early_says_where(tmp_path: Path) -> None:
    # The text has 4210 bytes, so 60 steps of 100 tokens do not fit.
    with pytest.raises(StepNotReachedError, match=r"ended at step \d+, before step 60"):
        train(tmp_path, "60", **{"dataloader.infinite": False, "training.seq_len": 100})


def run_capture(folder: Path, config: TrainConfig, step: int, **more: Any) -> CaptureResult:
    return capture_run(BridgeConfig(train=config), step=step, out=folder / "capture", **more)


def test_a_loss_that_is_nan_is_captured_all_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    config = demo(
        tmp_path, **{"optimizer.param_groups.0.optimizer_kwargs.lr": 1e30, "lr_scheduler.warmup_steps": 0}
    )
    result = run_capture(tmp_path, config, 3, ops=["*"], say=said.append)
    assert "not finite" in " ".join(said)
    capture = load_capture(result.path)
    assert any(d.nan for call in capture.calls for r in call.outputs if (d := r.digest) is not None)


def test_an_op_that_nothing_matches_names_near_misses_and_keeps_the_digests(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(
        UsageError, match=r"offset_rmsnrm matches no call of step 1.*did you mean offset_rmsnorm"
    ):
        run_capture(tmp_path, demo(tmp_path), 1, ops=["offset_rmsnrm"], say=said.append)
    assert "no kernel, module or module class is called 'offset_rmsnrm'" in " ".join(said)
    assert load_capture(tmp_path / "capture").complete


def test_an_op_of_the_config_that_nothing_matches_is_said_to_be_the_configs(tmp_path: Path) -> None:
    """A kernel that is known and not in use is no misspelling of itself."""
    config = BridgeConfig(train=demo(tmp_path), capture=CaptureConfig(ops=("geglu",)), path="my.toml")
    with pytest.raises(
        UsageError, match=r"my.toml: \[capture\] ops geglu matches no call of step 1"
    ) as refused:
        capture_run(config, step=1, out=tmp_path / "capture")
    assert "did you mean" not in str(refused.value) and "is it in use?" in str(refused.value)


def test_a_resumed_run_keeps_its_step_numbers_and_its_checkpoints(tmp_path: Path) -> None:
    checkpointed = {
        "checkpoint.enable": True,
        "checkpoint.interval": 2,
        "training.steps": 4,
        "metrics.log_freq": 1,
    }
    whole = Spy("4")
    run_titan(demo(tmp_path, **checkpointed), whole, config_path=None, stop=False)
    folder = tmp_path / "outputs" / "checkpoint"
    saved = sorted(path.name for path in folder.iterdir())
    assert saved == ["step-2", "step-4"]
    result = run_capture(tmp_path, demo(tmp_path, **{**checkpointed, "checkpoint.load_step": 2}), 3)
    assert result.step == 3
    assert result.metrics["loss"] == whole.losses[3][0]
    assert sorted(path.name for path in folder.iterdir()) == saved
    with pytest.raises(StepNotReachedError, match="resumes at step 3, past step 2"):
        capture_run(
            BridgeConfig(train=demo(tmp_path, **{**checkpointed, "checkpoint.load_step": 2})),
            step=2,
            out=tmp_path / "late",
        )
    assert not (tmp_path / "late").exists()


def test_captured_norms_are_what_forward_hooks_saw(tmp_path: Path) -> None:
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def hooked(parts: Sequence[Any], facts: RunFacts, step: int) -> Iterator[None]:
        tracer = Tracer(
            list(parts), out=tmp_path / "capture", step=step, selection=Selection(patterns=("OffsetRMSNorm",))
        )
        handles = [
            module.register_forward_hook(
                lambda m, given, result, name=name: seen.__setitem__(
                    name, (given[0].detach().clone(), result.detach().clone())
                )
            )
            for name, module in parts[0].named_modules()
            if name.endswith("norm")
        ]
        with tracer:
            yield
        tracer.finish()
        for handle in handles:
            handle.remove()

    run_titan(demo(tmp_path), Spy("2", hooked), config_path=None)
    capture = load_capture(tmp_path / "capture")
    assert len(seen) == 5
    for name, (given, returned) in seen.items():
        (call,) = [c for c in capture.calls if c.kind == "module" and c.module == name]
        assert torch.equal(capture.tensor(call.inputs[0]), given)
        assert torch.equal(capture.tensor(call.outputs[0]), returned)


def test_config_in_the_manifest_has_no_addresses() -> None:
    """Two runs of one config must record one config."""
    rendered = f"partial({plain_settings!r})"
    assert " at 0x" in rendered
    found = plain_settings({"init": {"weight": rendered}, "steps": [3, None]})
    assert found == {"init": {"weight": "partial(<function plain_settings>)"}, "steps": [3, None]}
