"""What capture relies on in torch's private interfaces; a failure here names the version that broke it."""

from __future__ import annotations

import inspect

import pytest
import torch

from bridge.capture._debugmode import StepMode

VERSION = f"torch {torch.__version__}"


def test_debugmode_is_where_and_what_it_was() -> None:
    from torch.utils._debug_mode import DebugMode, get_active_debug_mode

    assert issubclass(StepMode, DebugMode), VERSION
    accepted = inspect.signature(DebugMode.__init__).parameters
    assert {"record_output", "record_profiler_context"} <= set(accepted), VERSION
    for name in ("record_triton_kernel", "record_redistribute_calls", "record_output_placements"):
        ours = inspect.signature(getattr(StepMode, name)).parameters
        theirs = inspect.signature(getattr(DebugMode, name)).parameters
        assert list(ours) == list(theirs), f"{VERSION}: {name}"
    assert StepMode.ignore_compile_internals(), VERSION
    assert get_active_debug_mode() is None


@pytest.mark.parametrize(
    "name",
    [
        "_C._current_autograd_node",
        "_C._autograd._top_saved_tensors_default_hooks",
        "_C._functorch.is_functorch_wrapped_tensor",
        "_C._len_torch_dispatch_stack",
        "autograd._get_sequence_nr",
        "utils._python_dispatch._disable_current_modes",
        "utils._python_dispatch._get_current_dispatch_mode",
        "UntypedStorage._weak_ref",
        "UntypedStorage._free_weak_ref",
        "Tag.nondeterministic_seeded",
    ],
)
def test_private_names_are_there(name: str) -> None:
    import torch.utils._python_dispatch

    place: object = torch
    for part in name.split("."):
        assert hasattr(place, part), f"{VERSION} has no torch.{name}"
        place = getattr(place, part)


def test_a_forward_operators_node_is_the_last_one_numbered() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    assert y.grad_fn is not None
    newest = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    assert y.grad_fn._sequence_nr() == newest, VERSION  # type: ignore[attr-defined]


def test_checkpoints_recomputation_hook_is_still_named_so() -> None:
    from torch.utils import checkpoint

    assert "_recomputation_hook" in inspect.getsource(checkpoint), VERSION
