"""The state of the generator that an operator is about to draw from, so that the draw can be repeated."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import xxhash


def random_flags(args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """{"rng": {"device": "cpu", "hash": ...}}, with the state itself when `keep`.

    A CPU state is 5 KB, a CUDA state 16 bytes; reading one neither draws nor synchronizes.
    """
    device = _device(args, kwargs)
    given: Any = kwargs.get("generator")
    generator = given if isinstance(given, torch.Generator) else _default_generator(device)
    if generator is None:
        return {}
    state = generator.get_state().numpy().tobytes()
    found = {"device": device.type, "hash": xxhash.xxh3_64_hexdigest(state)}
    if keep:
        found["state"] = base64.b85encode(state).decode()
    return {"rng": found}


@contextlib.contextmanager
def random_state(flags: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Put a recorded state back for the length of a `with`; nothing happens where none was recorded.

    Raises:
        ValueError: the recorded state is not one.
    """
    recorded = flags.get("rng")
    generator = _default_generator(device)
    if not isinstance(recorded, dict) or "state" not in recorded or generator is None:
        yield
        return
    before = generator.get_state()
    state = bytearray(base64.b85decode(str(recorded["state"])))
    if len(state) != before.numel():
        raise ValueError(f"a generator's state has {before.numel()} bytes, the recorded one {len(state)}")
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
    try:
        yield
    finally:
        generator.set_state(before)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index: Any = device.index
        found: torch.Generator = torch.cuda.default_generators[
            torch.cuda.current_device() if index is None else index
        ]
        return found
    return None
