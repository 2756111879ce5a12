"""Set dotted, type-checked fields of a tree of dataclasses (torchtitan's trainer config).

Independent of torchtitan: the command-line flags of that project come and go, its dataclasses
stay. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import ConfigError, brief, near_misses


def apply_settings(root: Any, settings: Mapping[str, Any]) -> None:
    """Set each dotted field of `root` in place.

    A path walks dataclass fields and, through lists and tables, indices and keys: "training.steps",
    "model_spec.model.layers.0.attention_norm.eps", "optimizer.param_groups.0.optimizer_kwargs.lr". The
    string "none" sets an optional field to None,
    since TOML has no null.

    Args:
        root: A dataclass instance.
        settings: Dotted path -> value as TOML gives it.

    Raises:
        ConfigError: an unknown field (siblings listed), a value of the wrong type, or a combination
            that the config itself refuses.
    """
    for path, value in settings.items():
        _set(root, path, value)
    check = getattr(root, "__post_init__", None)
    if settings and check is not None:
        # Dataclasses check combinations only when built; the values have changed since.
        try:
            check()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"[train.set] gives a config that its owner refuses: {error}") from None


def get_setting(root: Any, path: str, default: Any = None) -> Any:
    """Value of a dotted field, or `default` where some part of the path is missing."""
    node = root
    for name in path.split("."):
        node = getattr(node, name, None)
        if node is None:
            return default
    return node


def _set(root: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    node = root
    walked = ""
    for name in parents:
        node = _step(node, name, walked, path)
        walked = f"{walked}.{name}".lstrip(".")
    current = _step(node, last, walked, path)
    if dataclasses.is_dataclass(current) and not isinstance(current, type) and value != "none":
        fields = ", ".join(sorted(f.name for f in dataclasses.fields(current)))
        raise ConfigError(f"[train.set] {path!r} is a section; set one of its fields: {fields}")
    if isinstance(node, list):
        node[int(last)] = _convert(value, type(current), path)
    elif isinstance(node, dict):
        node[last] = _convert(value, type(current), path)
    else:
        setattr(node, last, _convert(value, _hints(type(node)).get(last, Any), path))


def _step(node: Any, name: str, walked: str, path: str) -> Any:
    if isinstance(node, list):
        if name.isdigit() and int(name) < len(node):
            return node[int(name)]
        raise ConfigError(
            f"[train.set] {path!r}: {walked} is a list of {len(node)}; {name!r} is no index of it"
        )
    if isinstance(node, dict):
        if name in node:
            return node[name]
        raise ConfigError(
            f"[train.set] {path!r}: {walked} has no {name!r}; {near_misses(name, map(str, node))}"
        )
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        kind = type(node).__name__
        raise ConfigError(f"[train.set] {path!r}: {walked} is a value ({kind}), it has no field {name!r}")
    names = [f.name for f in dataclasses.fields(node)]
    if name not in names:
        where = walked or type(node).__qualname__
        raise ConfigError(f"[train.set] {path!r}: {where} has no field {name!r}; {near_misses(name, names)}")
    return getattr(node, name)


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):
        # A hint that cannot be evaluated here: the field is then set unchecked, as Python itself would.
        return {}


def _convert(value: Any, hint: Any, path: str) -> Any:
    if value == "none" and type(None) in typing.get_args(hint):
        return None
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[train.set] {path!r}: {str(error).replace('`', '')}, got {value!r}") from None
    except TypeError:
        if isinstance(value, str | int | float | bool) and type(value) in (hint, *typing.get_args(hint)):
            return value
        raise ConfigError(f"[train.set] {path!r} has type {hint}, which TOML cannot express") from None


def explain_job(job: str, version: str) -> str:
    """What to write for torchtitan 0.3 instead of a 0.2.x job file; ConfigError when it cannot be read."""
    try:
        document = tomllib.loads(Path(job).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"[train] job names {job}, which cannot be read: {brief(error)}") from None
    model = document.get("model", {})
    name = model.get("name", "llama3")
    flavor = model.get("flavor", "debugmodel")
    return (
        f"{job} is a job file of torchtitan 0.2.x, but torchtitan {version} is installed, "
        f"which reads no TOML; "
        f'write [train] module = "{name}", config = "{name}_{flavor}" and its settings as dotted keys under '
        f'[train.set] ("training.steps" = ...), or install torchtitan==0.2.2'
    )


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def plain_settings(value: Any) -> Any:
    """A config as plain data; the addresses in rendered functions, which differ between equal ones, go."""
    if isinstance(value, dict):
        return {key: plain_settings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_settings(item) for item in value]
    return _ADDRESS.sub("", value) if isinstance(value, str) else value
