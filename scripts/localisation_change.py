"""One planted change of bench_localisation, and ways to plant it into a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Plant = Callable[[torch.nn.Module], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One planted change. `base` is applied to both runs, `plant` and `settings` to the candidate.

    A fault's `where` is the module (FQN prefix) or the op that the first suspect must be; a legal change has
    none and must name no suspect.
    """

    name: str
    where: tuple[str, ...] = ()
    plant: Plant | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    base: Plant | None = None
    base_settings: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    config: str = "bridge.demo:offset_decoder"  #: module and function of the torchtitan config
    ranks: int = 1  #: processes of the candidate
    base_ranks: int = 0  #: processes of the baseline; 0: as many
    missing: Callable[[], str] = str  #: why it cannot run here; "": it can


def at(fqn: str, forward: Callable[..., Any]) -> Plant:
    """Replace one module's forward by `forward(module, *inputs)`."""

    def plant(model: torch.nn.Module) -> None:
        module = model.get_submodule(fqn)
        module.forward = lambda *args, **more: forward(module, *args, **more)  # type: ignore[method-assign]

    return plant


def everywhere(name: str, forward: Callable[..., Any]) -> Plant:
    """The same for all modules whose FQN ends in `name`."""

    def plant(model: torch.nn.Module) -> None:
        for fqn, _ in list(model.named_modules()):
            if fqn == name or fqn.endswith(f".{name}"):
                at(fqn, forward)(model)

    return plant


def after(fqn: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Change what one module returns."""

    def plant(model: torch.nn.Module) -> None:
        module = model.get_submodule(fqn)
        plain = module.forward
        module.forward = lambda *args, **more: change(plain(*args, **more))  # type: ignore[method-assign]

    return plant


def weight(fqn: str, change: Callable[[torch.Tensor], None]) -> Plant:
    """Change a parameter in place before the step."""

    def plant(model: torch.nn.Module) -> None:
        parameter = model.get_submodule(fqn).weight
        with torch.no_grad():
            change(parameter.to_local() if hasattr(parameter, "to_local") else parameter)  # type: ignore[operator]

    return plant
