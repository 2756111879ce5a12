"""A SwiGLU feed-forward block with one weight for gate and up, which checkpoints as two. Plain torch.

The weight is `w13` `[hidden, 2, dim]`: `w13[:, 0]` is the gate's (w1), `w13[:, 1]` the up projection's (w3).
So one matrix product makes both, and a shard of the first axis holds matching rows of the two.

Checkpoint layout: a state dict has `w1.weight` and `w3.weight`, never `w13`, so files are interchangeable
with the block of two weights. Loading names a key that is truly missing by the name it has in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import linear

#: Names of the halves in a checkpoint, in the order of the second axis of `w13`.
HALVES = ("w1.weight", "w3.weight")


def gate_and_up(x: torch.Tensor, w13: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both projections of `x` `[..., dim]` in one product: gate and up `[..., hidden]`, column stride 2."""
    both = linear(x, w13.flatten(0, 1))
    both = both.view(*both.shape[:-1], -1, 2)
    return both[..., 0], both[..., 1]


def keep_two_weights_in_checkpoints(module: torch.nn.Module) -> None:
    """Make `module`, which has a parameter `w13`, save and load `w1.weight` and `w3.weight`."""
    module.register_state_dict_post_hook(_split_on_save)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_merge_on_load)  # type: ignore[no-untyped-call]


def _split_on_save(module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    w13 = state.pop(f"{prefix}w13")
    # The stock block lists w1, w2, w3; a file of equal bytes needs the order too.
    others = [(name, state.pop(name)) for name in list(state) if name.startswith(prefix)]
    gate, up = (w13[:, half].contiguous() for half in range(2))
    state.update([(prefix + HALVES[0], gate), *others, (prefix + HALVES[1], up)])


def _merge_on_load(
    module: torch.nn.Module,
    state: dict[str, Any],
    prefix: str,
    _metadata: Mapping[str, Any],
    _strict: bool,
    missing: list[str],
    _unexpected: list[str],
    errors: list[str],
) -> None:
    if f"{prefix}w13" in state:
        return
    own = module.get_parameter("w13").detach()
    halves, complete = [], True
    for half, name in enumerate(HALVES):
        key, mine = prefix + name, own[:, half]
        given = state.pop(key, None)
        # Faults are named as in the file. The module's own half stands in, or torch would name `w13` too.
        if given is None:
            missing.append(key)
        elif given.shape != mine.shape:
            errors.append(
                f"size mismatch for {key}: {tuple(given.shape)} in the checkpoint, {tuple(mine.shape)} here."
            )
            given = None
        complete = complete and given is not None
        halves.append(mine if given is None else given)
    mixed = not complete and not _stackable(*halves)
    state[f"{prefix}w13"] = own if mixed else torch.stack(halves, dim=1)


def _stackable(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether a half from the file and one of the module are both sharded or both plain, on one device."""
    return gate.device == up.device and hasattr(gate, "device_mesh") is hasattr(up, "device_mesh")
