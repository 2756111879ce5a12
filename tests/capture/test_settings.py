"""Dotted overrides: what they set, and what each mistake says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from bridge.capture.settings import apply_settings, get_setting
from bridge.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Norm:
    eps: float = 1e-5


@dataclass(kw_only=True, slots=True)
class Training:
    steps: int = 10
    dtype: Literal["bfloat16", "float32"] = "float32"
    limit: int | None = 3
    max_norm: float | int = 1.0
    kwargs: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3, "fused": True})
    norms: list[Norm] = field(default_factory=lambda: [Norm(), Norm()])
    imports: list[str | tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.steps == 13:
            raise ValueError("13 is not a number of steps")


@dataclass(kw_only=True, slots=True)
class Root:
    training: Training = field(default_factory=Training)
    name: str = "x"

    def __post_init__(self) -> None:
        self.training.__post_init__()


def test_sets_nested_fields() -> None:
    root = Root()
    apply_settings(
        root,
        {
            "training.steps": 20,
            "training.dtype": "bfloat16",
            "training.norms.1.eps": 1e-6,
            "training.limit": "none",
            "training.imports": ["a.b", ["c.d", {"k": 1}]],
            "training.max_norm": 2,
            "training.kwargs.lr": 1,
        },
    )
    assert (root.training.steps, root.training.dtype, root.training.limit) == (20, "bfloat16", None)
    assert [norm.eps for norm in root.training.norms] == [1e-5, 1e-6]
    assert root.training.imports == ["a.b", ("c.d", {"k": 1})]
    assert root.training.max_norm == 2
    assert root.training.kwargs == {"lr": 1.0, "fused": True}


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("training.stps", 3, ["no field 'stps'", "did you mean steps"]),
        ("trainin.steps", 3, ["no field 'trainin'", "training"]),
        ("training.steps", "many", ["Expected int", "'many'"]),
        ("training.steps", True, ["Expected int"]),
        ("training.dtype", "float8", ["float8"]),
        ("training", 3, ["is a section", "steps"]),
        ("training.steps.deep", 3, ["is a value (int)"]),
        ("training.norms.7.eps", 1.0, ["list of 2", "'7'"]),
        ("training.kwargs.rl", 1.0, ["no 'rl'", "did you mean lr"]),
        ("training.kwargs.fused", "yes", ["Expected bool"]),
        ("training.steps", 13, ["13 is not a number of steps"]),
    ],
)
def test_mistakes_are_named(path: str, value: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_settings(Root(), {path: value})
    for part in ["[train.set]", *parts]:
        assert part in str(caught.value)


def test_get_setting_walks_and_defaults() -> None:
    assert get_setting(Root(), "training.steps") == 10
    assert get_setting(Root(), "training.nothing.there", 5) == 5
