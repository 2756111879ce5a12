"""`train.toml` as frozen records: what to train, what to capture, how to judge.

    [train]     which run: a torchtitan config (`module`, `config`), a torchtitan 0.2.x job file
                (`job`) or any training script (`script`, `args`)
    [train.set] dotted fields of the torchtitan config
    [capture]   which step, which calls, how much
    [verify]    the gate's constants

An unknown key, a wrong type or an impossible value is a ConfigError that names the file, the key's
path and its siblings. This module imports neither torch nor torchtitan.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from bridge.capture.record import Phase
from bridge.errors import ConfigError, near_misses

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

#: Sections that a torchtitan 0.2.x job file has and ours does not.
_TITAN_SECTIONS = frozenset({"job", "model", "training", "optimizer", "parallelism", "checkpoint", "metrics"})

TensorChoice = Literal["all", "inputs", "outputs", "none"]
Trigger = Literal["nonfinite", "loss-jump"]


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which run to capture; exactly one of `module` + `config`, `job` and `script` is given."""

    module: str | None = None  #: torchtitan 0.3: registry name ("llama3") or an importable module
    config: str | None = None  #: torchtitan 0.3: function of that registry ("llama3_debugmodel")
    set: dict[str, Any] = {}  #: torchtitan 0.3: dotted field -> value
    job: str | None = None  #: torchtitan 0.2.x: its own TOML
    script: str | None = None  #: any other training script
    args: tuple[str, ...] = ()  #: arguments of the script, or of torchtitan 0.2.x's own command line


class CaptureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to record; the command line wins over each of these."""

    step: int | str | None = None  #: 100, or "90:110" for a window
    ops: tuple[str, ...] = ()  #: kernel names and globs over key, op, module and module class
    modules: tuple[str, ...] = ()  #: globs over module FQN and class
    tensors: TensorChoice | None = None
    phases: tuple[Phase, ...] = ()  #: empty: all
    ranks: tuple[int, ...] = ()  #: empty: every rank
    max_bytes: str | int | None = None  #: hard cap of one rank's stored tensors, "8 GiB"
    max_tensor_bytes: str | int | None = None  #: larger tensors keep their digest only
    on: Trigger | None = None
    replace: dict[str, str] = {}  #: module class -> kernel put in its place, by name

    @property
    def budget_bytes(self) -> int | None:
        """`max_bytes` in bytes."""
        return None if self.max_bytes is None else parse_size(self.max_bytes, where="capture.max_bytes")

    @property
    def tensor_bytes(self) -> int | None:
        """`max_tensor_bytes` in bytes."""
        limit = self.max_tensor_bytes
        return None if limit is None else parse_size(limit, where="capture.max_tensor_bytes")


class VerifyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of the gate; None leaves the kernel's own declaration in force."""

    fudge_factor: float | None = None
    project_atol: float | None = None
    max_reference_relative_error: float | None = None


class BridgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole `train.toml`."""

    train: TrainConfig = TrainConfig()
    capture: CaptureConfig = CaptureConfig()
    verify: VerifyConfig = VerifyConfig()
    path: str | None = None  #: the file it came from, absolute


def parse_size(text: str | int, *, where: str = "size") -> int:
    """Return the bytes that "8 GiB", "512 MB" or 4096 mean.

    Raises:
        ConfigError: the text is no number with a known unit, or is not positive.
    """
    if isinstance(text, int):
        if text > 0:
            return text
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\s*", text)
        if match and match[2].lower() in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    raise ConfigError(f'{where} must be a positive size such as "8 GiB", "512 MB" or 4096, got {text!r}')


def load_config(path: Path | str) -> BridgeConfig:
    """Read `train.toml`, or a torchtitan 0.2.x job file, which becomes `train.job`.

    Raises:
        ConfigError: no such file, not TOML, an unknown key, a wrong type, or nothing to train.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    where = str(path.resolve())
    ours = set(BridgeConfig.__struct_fields__) - {"path"}
    if not ours & document.keys() and _TITAN_SECTIONS & document.keys():
        return BridgeConfig(train=TrainConfig(job=where), path=where)
    _check_keys(document, BridgeConfig, path, prefix="")
    try:
        config = msgspec.convert({**document, "path": where}, BridgeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_plain(str(error))}") from None
    _check_values(config, path)
    return msgspec.structs.replace(config, train=_beside(config.train, path.resolve().parent))


def _beside(train: TrainConfig, folder: Path) -> TrainConfig:
    """Files that the config names lie beside it, or where the command runs."""
    named = {name: value for name in ("job", "script") if (value := getattr(train, name)) is not None}
    found = {name: str(folder / value) for name, value in named.items() if (folder / value).is_file()}
    return msgspec.structs.replace(train, **found)


def _missing(path: Path) -> str:
    found = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    hint = f"; this folder has {', '.join(found)}" if found else ""
    return f"there is no config file {path}{hint}; name one with --config FILE"


def _check_keys(table: dict[str, Any], record: type[msgspec.Struct], path: Path, *, prefix: str) -> None:
    """Name the first unknown key with its full path and its siblings, before any type is looked at."""
    known = {field.name: field.type for field in msgspec.structs.fields(record) if field.name != "path"}
    for key, value in table.items():
        if key not in known:
            titan = " (a torchtitan 0.2.x section? then it belongs in a job file of its own: [train] job = "
            hint = f'{titan}"job.toml")' if not prefix and key in _TITAN_SECTIONS else ""
            near = near_misses(key, known)
            raise ConfigError(f"{path}: unknown key {prefix + key!r}{hint}; {near}")
        inner = known[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {prefix + key} must be a table, got {type(value).__name__}")
            _check_keys(value, inner, path, prefix=f"{prefix}{key}.")


def _plain(message: str) -> str:
    """msgspec's "... - at `$.capture.step`" as "capture.step: ..."."""
    text, _, place = message.partition(" - at `$.")
    return f"{place.rstrip('`')}: {text}" if place else message


def _check_values(config: BridgeConfig, path: Path) -> None:
    train = config.train
    given = [name for name in ("module", "job", "script") if getattr(train, name) is not None]
    if train.config is not None and train.module is None:
        raise ConfigError(f"{path}: train.config needs train.module, the torchtitan registry that holds it")
    if train.module is not None and train.config is None:
        raise ConfigError(f'{path}: train.module needs train.config, e.g. config = "llama3_debugmodel"')
    if len(given) > 1:
        raise ConfigError(f"{path}: [train] names {' and '.join(given)}; give exactly one of them")
    if train.set and train.module is None:
        raise ConfigError(f"{path}: [train.set] needs train.module and train.config to apply to")
    for name in ("max_bytes", "max_tensor_bytes"):
        if (size := getattr(config.capture, name)) is not None:
            parse_size(size, where=f"{path}: capture.{name}")
    for name, value in (
        ("verify.fudge_factor", config.verify.fudge_factor),
        ("verify.project_atol", config.verify.project_atol),
        ("verify.max_reference_relative_error", config.verify.max_reference_relative_error),
    ):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{path}: {name} must be a finite number of at least 0, got {value}")
