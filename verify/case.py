"""One case: the inputs that golden, reference and target are all given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the run recorded for this call, for replay fidelity and `--target recorded`."""

    outputs: Mapping[str, torch.Tensor]
    grads: Mapping[str, torch.Tensor]  #: by input name; may be empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Inputs in their low-precision dtype and exact layout, made once and shared by all three.

    inputs: one tensor per `KernelSpec.inputs` entry.
    grad_outputs: one upstream gradient per output, or () when the kernel has no gradients.
    """

    name: str
    family: str
    dtype: str
    inputs: tuple[torch.Tensor, ...]
    attrs: Mapping[str, Any]
    grad_outputs: tuple[torch.Tensor, ...] = ()
    recorded: Recorded | None = None
    notes: tuple[str, ...] = field(default=())
    configs: bool = False  #: every autotune configuration of the target is judged on this case
