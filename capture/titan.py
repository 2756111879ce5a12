"""Run torchtitan as it is, with a recorder around its `train_step`.

The only file of this package that imports torchtitan; 0.3.x (registry of configs) and 0.2.x (TOML
job file) are driven through the same five attributes of their trainers: `train_step`,
`model_parts`, `metrics_processor`, `checkpointer` and `step`. Nothing of torchtitan is edited; what
is set aside for the run (environment, the device module on a machine without an accelerator) is
put back after it.

A run that ends with its captured step writes no checkpoint: it may resume from the user's, and must
not overwrite or prune them.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from msgspec.structs import replace

from bridge.capture.settings import apply_settings, explain_job, get_setting, plain_settings
from bridge.capture.steps import RunFacts, StepRecorder
from bridge.capture.surroundings import (
    cpu_module,
    import_paths,
    missing_upstream,
    plain_sums,
    process_state,
    rendezvous,
    run_log,
)
from bridge.config import TrainConfig
from bridge.errors import (
    BridgeError,
    ConfigError,
    RunError,
    StepNotReachedError,
    UsageError,
    brief,
    near_misses,
)

#: torchtitan's words for a loss that is NaN or infinite.
_LOST = re.compile(r"Loss is not finite \(global_avg_loss=([^)]*)\)")


class _Finished(BaseException):
    """Leaves the trainer's loop; no `except Exception` on the way takes it for a failure."""


def titan_version() -> str:
    """Installed torchtitan's version.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        hint = "pip install 'numerics-bridge[titan]'"
        raise UsageError(f"this config needs torchtitan, which is not installed; {hint}") from None


def run_titan(
    train: TrainConfig,
    recorder: StepRecorder,
    *,
    config_path: str | None,
    verbose: bool = False,
    stop: bool = True,
) -> None:
    """Train until the recorder has what it wants.

    Args:
        train: `module` + `config` (torchtitan 0.3) or `job` (torchtitan 0.2.x).
        recorder: Called around every step.
        config_path: Where the config came from, for messages and the manifest.
        verbose: Show torchtitan's own log on stderr.
        stop: End the run then, and write no checkpoint at all; False leaves the run as it is.

    Raises:
        ConfigError: The config does not fit the installed torchtitan.
        StepNotReachedError: The run is too short, by its config or by its data.
        RunError: Training failed for a reason of its own.
    """
    version = titan_version()
    old = version.startswith("0.2.")
    if train.job is not None and not old:
        raise ConfigError(explain_job(train.job, version))
    if train.module is not None and old:
        raise ConfigError(
            f"torchtitan {version} has no config registry, so [train] module and config cannot be served; "
            f'name its job file with [train] job = "job.toml", or install torchtitan 0.3'
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(import_paths(config_path))
        stack.enter_context(process_state())
        stack.enter_context(rendezvous())
        on_cpu = stack.enter_context(_device_module())
        stack.enter_context(missing_upstream())
        stack.enter_context(run_log(verbose))
        notes: dict[str, Any] = {"torchtitan_cuda_graphs": False}
        if old:
            config = _load_job(train)
            build = _job_trainer
        else:
            config = _load_registry(train)
            apply_settings(config, train.set)
            # A replayed CUDA graph dispatches nothing that could be seen.
            config.training.disable_cuda_graphs = True
            if on_cpu and (swapped := _swap_flex_attention(config)):
                notes["attention"] = f"ScaledDotProductAttention instead of FlexAttention at {swapped} places"
                recorder.say("FlexAttention has no backward on CPU; this run uses ScaledDotProductAttention")
            build = _build_trainer
        _check_length(config, recorder, train)
        facts = RunFacts(
            config=plain_settings(config.to_dict()),
            config_path=config_path,
            seed=get_setting(config, "debug.seed", get_setting(config, "training.seed")),
            flags=notes,
        )
        _drive(build, config, recorder, facts, stop=stop)


def checkpoint_steps(train: TrainConfig, config_path: str | None) -> tuple[Path, tuple[int, ...]] | None:
    """Folder and steps of the checkpoints that this run would resume from; None: it loads none.

    Raises ConfigError as `run_titan` does.
    """
    config = _config_of(train, config_path)
    if not get_setting(config, "checkpoint.enable", False):
        return None
    folder = Path(get_setting(config, "dump_folder", ".")) / get_setting(config, "checkpoint.folder", "")
    named = [path.parent.name.removeprefix("step-") for path in folder.glob("step-*/.metadata")]
    return folder, tuple(sorted(int(step) for step in named if step.isdigit()))


def clashing_overrides(
    train: TrainConfig, config_path: str | None, present: Sequence[Any], wanted: Sequence[str]
) -> tuple[tuple[Any, str], ...]:
    """Pairs of a present and a wanted override that torchtitan refuses to apply together.

    One that fails by itself is no clash: the run says so.
    """

    def refused(*imports: Any) -> bool:
        return _refusal(train, config_path, imports) is not None

    alone = [item for item in wanted if not refused(item)]
    return tuple(
        (item, other)
        for item in present
        if not refused(item)
        for other in alone
        if item != other and refused(item, other)
    )


def check_overrides(
    train: TrainConfig, config_path: str | None, wanted: Sequence[str], settings: Mapping[str, Any]
) -> None:
    """Whether a run could have these overrides and settings besides its own, found without running it.

    Raises:
        ConfigError: The config does not fit the installed torchtitan, whatever is added.
        UsageError: An override cannot be imported, is none or cannot be applied, or a setting does not fit.
    """
    _config_of(train, config_path)
    try:
        _config_of(replace(train, set={**train.set, **settings}), config_path)
    except ConfigError as error:
        raise UsageError(f"--override {str(error).removeprefix('[train.set] ')}") from None
    for item in wanted:
        refusal = _refusal(train, config_path, [item])
        if refusal is not None:
            raise UsageError(
                f"--override {item} cannot be applied: {type(refusal).__name__}: {brief(refusal)}; it takes "
                f"package.module.function of a function with torchtitan's @override, or KEY=VALUE"
            ) from refusal


def _refusal(train: TrainConfig, config_path: str | None, imports: Sequence[Any]) -> Exception | None:
    """What applying these overrides to the run's config raises; None: they can be applied."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    config = _config_of(train, config_path)
    listed = [item if isinstance(item, str) else (item[0], dict(item[1])) for item in imports]
    with import_paths(config_path):
        try:
            apply_overrides(OverrideConfig(imports=listed), config)
        except Exception as error:
            # Whatever the user's module or factory raises, a run with it would end with that.
            return error
    return None


def _config_of(train: TrainConfig, config_path: str | None) -> Any:
    """The settled config of a run, without running it."""
    with import_paths(config_path):
        if train.job is not None:
            return _load_job(train)
        config = _load_registry(train)
        apply_settings(config, train.set)
    return config


def _drive(build: Any, config: Any, recorder: StepRecorder, facts: RunFacts, *, stop: bool) -> None:
    """Build the trainer, wrap its step, train."""
    trainer = None
    started = torch.distributed.is_initialized()
    try:
        trainer = build(config)
        if trainer.device.type == "cpu" and torch.distributed.get_world_size() > 1:
            plain_sums(trainer.model_parts)
        _attach(trainer, recorder, facts, stop=stop)
        trainer.train()
    except _Finished:
        pass
    except (BridgeError, KeyboardInterrupt):
        raise
    except Exception as error:
        if recorder.failure is not None:
            return
        where = "before its first step" if trainer is None else f"in step {getattr(trainer, 'step', '?')}"
        raise RunError(f"training failed {where}: {type(error).__name__}: {error}") from error
    finally:
        if trainer is not None:
            trainer.close()
        if not started and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if not recorder.finished:
        raise StepNotReachedError(recorder.not_reached(getattr(trainer, "step", 0)))


def _attach(trainer: Any, recorder: StepRecorder, facts: RunFacts, *, stop: bool) -> None:
    """Put the recorder around this trainer's steps; on the instance, so that no class changes."""
    train_step = trainer.train_step
    metrics = trainer.metrics_processor
    log, should_log = metrics.log, metrics.should_log
    recorder.attach(trainer.model_parts, facts)

    def recorded_step(data_iterator: Any) -> None:
        stopped: list[RuntimeError] = []

        def run() -> None:
            try:
                train_step(data_iterator)
            except RuntimeError as error:
                # torchtitan gives up on a loss that is not finite, after the whole step has run: the very
                # step that somebody wants to look at, and complete.
                loss = _LOST.search(str(error))
                if loss is None or not recorder.wants_metrics(trainer.step):
                    raise
                recorder.metrics(trainer.step, loss=float(loss[1]), grad_norm=None)
                stopped.append(error)

        recorder.run_step(trainer.step, run)
        if stopped:
            recorder.say(f"torchtitan stops here: {stopped[0]}")
        if recorder.finished and stop:
            raise _Finished
        if stopped:
            raise stopped[0]

    def recorded_log(step: int, loss: float, max_loss: float, grad_norm: float, **more: Any) -> None:
        recorder.metrics(step, loss=float(loss), grad_norm=float(grad_norm))
        log(step, loss, max_loss, grad_norm, **more)

    def save(*_args: Any, **_kwargs: Any) -> None:
        """Checkpoints of the real run stay as they are."""

    trainer.train_step = recorded_step
    metrics.log = recorded_log
    metrics.should_log = lambda step: recorder.wants_metrics(step) or should_log(step)
    if stop:
        trainer.checkpointer.save = save


def _build_trainer(config: Any) -> Any:
    return config.build()


def _job_trainer(config: Any) -> Any:
    trainer = importlib.import_module("torchtitan.train").Trainer
    return trainer(config)


def _check_length(config: Any, recorder: StepRecorder, train: TrainConfig) -> None:
    steps = get_setting(config, "training.steps", 0)
    if recorder.last_step is not None and steps < recorder.last_step:
        where = '[train.set] "training.steps"' if train.job is None else "training.steps of the job file"
        raise StepNotReachedError(
            f"the config trains for {steps} steps, so step {recorder.last_step} never comes; "
            f"ask for a step up to {steps}, or raise {where} (the learning-rate schedule depends on it)"
        )


def _load_registry(train: TrainConfig) -> Any:
    """The config object that `module` and `config` name, looked up as torchtitan 0.3 does."""
    name = str(train.module)
    if "." in name or importlib.util.find_spec(f"torchtitan.models.{name}") is None:
        candidates = [f"{name}.config_registry", name, f"torchtitan.experiments.{name}.config_registry"]
    else:
        candidates = [f"torchtitan.models.{name}.config_registry"]
    registry = next(filter(None, map(_import_if_there, candidates)), None)
    if registry is None:
        from torchtitan.models import _supported_models

        hint = near_misses(name, _supported_models)
        raise ConfigError(
            f"[train] module = {name!r} is no torchtitan model and no importable module; {hint}"
        )
    function = getattr(registry, str(train.config), None)
    if not callable(function):
        names = [n for n, f in vars(registry).items() if callable(f) and n[0].islower() and n[0] != "_"]
        own = [n for n in names if getattr(getattr(registry, n), "__module__", "") == registry.__name__]
        hint = near_misses(str(train.config), own or names)
        raise ConfigError(f"[train] config = {train.config!r} is not in {registry.__name__}; {hint}")
    return function()


def _import_if_there(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise ConfigError(f"[train] module: importing {name} failed: {error}") from error


def _load_job(train: TrainConfig) -> Any:
    """A 0.2.x JobConfig from its own TOML, read by torchtitan itself."""
    path = Path(str(train.job))
    if not path.is_file():
        raise ConfigError(f"[train] job names {path}, which is not a file")
    manager = importlib.import_module("torchtitan.config").ConfigManager
    try:
        return manager().parse_args(["--job.config_file", str(path), *train.args])
    except SystemExit:
        # tyro prints what it dislikes and exits.
        raise ConfigError(f"torchtitan {titan_version()} refuses {path}; its message is above") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"torchtitan {titan_version()} refuses {path}: {error}") from error


def _swap_flex_attention(config: Any) -> int:
    """Replace FlexAttention, which has no CPU backward, throughout the config; return how often."""
    from torchtitan.config.override import derive
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    nodes = list(config.traverse(FlexAttention.Config))
    for _fqn, node, parent, name in nodes:
        plain = derive(node, ScaledDotProductAttention.Config)
        if isinstance(parent, list):
            parent[name] = plain
        else:
            setattr(parent, name, plain)
    return len(nodes)


@contextlib.contextmanager
def _device_module() -> Iterator[bool]:
    """Without an accelerator, give torchtitan the CPU as its device; yields whether that was so."""
    from torchtitan.tools import utils

    if _accelerator() is not None:
        yield False
        return
    saved = (utils.device_type, utils.device_module)
    _set_everywhere("cpu", cpu_module())
    try:
        yield True
    finally:
        _set_everywhere(*saved)


def _accelerator() -> str | None:
    found: str | None = torch._utils._get_available_device_type()  # type: ignore[no-untyped-call]
    return found


def _set_everywhere(device_type: str, device_module: Any) -> None:
    """Set both names in each torchtitan module that has imported them by value."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torchtitan":
            continue
        for attribute, value in (("device_type", device_type), ("device_module", device_module)):
            if attribute in vars(module):
                setattr(module, attribute, value)
