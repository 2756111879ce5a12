"""A function or custom op judged against its eager twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bridge.capture import Tracer
from bridge.capture.select import Selection
from bridge.errors import UsageError
from bridge.verify import pair
from bridge.verify.request import Request
from bridge.verify.session import execute


@torch.library.custom_op("bridge_pair_tests::scaled_add", mutates_args=())
def scaled_add(x: torch.Tensor, scale: float, y: torch.Tensor) -> torch.Tensor:
    return x + scale * y


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.scale = inputs[1]


scaled_add.register_autograd(lambda ctx, grad: (grad.clone(), None, ctx.scale * grad), setup_context=_setup)

FILE = """
import torch

def eager(x: torch.Tensor, scale: float, y: torch.Tensor) -> torch.Tensor:
    return x + scale * y

def wrong(x: torch.Tensor, scale: float, y: torch.Tensor) -> torch.Tensor:
    return x + scale * scale * y

@torch.library.custom_op("bridge_pair_tests::wrong_add", mutates_args=())
def wrong_add(x: torch.Tensor, y: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
    return x + 1.01 * scale * y

def eager_default(x: torch.Tensor, y: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
    return x + scale * y
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "twins.py"
    path.write_text(FILE)
    return path


class Adds(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.bridge_pair_tests.scaled_add(x, 0.5, x.square())
        return result


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Adds()
    tracer = Tracer(
        model,
        out=tmp_path / "capture",
        step=2,
        selection=Selection(patterns=("bridge_pair_tests::scaled_add",)),
    )
    with tracer:
        model(torch.randn(4, 6, requires_grad=True)).sum().backward()
    tracer.finish()
    return tmp_path / "capture"


def test_a_captured_custom_op_against_its_twin(file: Path, captured: Path) -> None:
    verdict = execute(
        Request(
            reference=f"{file}:eager",
            target_fn="torch.ops.bridge_pair_tests.scaled_add",
            capture=str(captured),
            sweep=False,
        )
    )
    assert verdict.verdict == "PASS" and verdict.op == "scaled_add"
    # Scalars come from the run, gradients from the op's own autograd.
    assert verdict.cases[0].attrs == {"scale": 0.5}
    assert {entry.tensor for entry in verdict.tensors} == {"output", "grad_x", "grad_y"}
    assert verdict.fidelity.status == "bit-equal"


def test_drawn_inputs_and_a_wrong_op(file: Path) -> None:
    verdict = execute(
        Request(
            reference=f"{file}:eager_default", target_fn=f"{file}:wrong_add", shapes=((4, 8),), quick=True
        )
    )
    assert verdict.verdict == "FAIL"
    assert {entry.tensor for entry in verdict.tensors} == {"output"}


def test_arguments_come_from_schema_or_signature(file: Path) -> None:
    by_schema = pair.arguments_of(torch.ops.bridge_pair_tests.scaled_add)
    assert [(a.name, a.tensor) for a in by_schema] == [("x", True), ("scale", False), ("y", True)]
    by_signature = pair.arguments_of(pair.resolve(f"{file}:eager_default"))
    assert [(a.name, a.tensor, a.default) for a in by_signature][2] == ("scale", False, 3.0)
    assert pair.arguments_of(len) in ((), pair.arguments_of(len))
    assert pair.site_of(torch.ops.bridge_pair_tests.scaled_add, "x") == "bridge_pair_tests::scaled_add"
    assert pair.site_of(pair.resolve(f"{file}:eager"), f"{file}:eager") == "eager"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.nn.functional.reluu", "there is no 'reluu'; did you mean relu"),
        ("no_such_package.f", "must be a dotted name"),
        ("torch.pi", "must be callable, got float"),
        ("plain", "must be a dotted name"),
        ("torch.ops.bridge_pair_tests.absent", "there is no 'absent'"),
    ],
)
def test_names_that_cannot_be_resolved(name: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        pair.resolve(name)


def test_without_inputs_it_says_what_is_missing(file: Path, captured: Path) -> None:
    with pytest.raises(UsageError, match="nothing says what inputs"):
        execute(Request(reference=f"{file}:eager", target_fn=f"{file}:wrong"))
    with pytest.raises(UsageError, match="no forward call of wrong"):
        execute(Request(reference=f"{file}:eager", target_fn=f"{file}:wrong", capture=str(captured)))
    with pytest.raises(UsageError, match="go together"):
        execute(Request(reference=f"{file}:eager"))
    with pytest.raises(UsageError, match="the reference must run on"):
        execute(
            Request(
                reference="torch.nn.functional.linear",
                target_fn=f"{file}:wrong_add",
                shapes=((4, 8),),
                quick=True,
            )
        )
