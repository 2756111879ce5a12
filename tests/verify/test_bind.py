"""Which captured calls are judged, and which captured tensor becomes which input."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bridge.capture.record import Call, Digest, Manifest, TensorRecord
from bridge.errors import SpecError, UsageError
from bridge.verify import bind, sites
from bridge.verify.match import match_inputs
from bridge.verify.spec import KernelSpec


class FakeCapture:
    """As much of `bridge.capture.store.Capture` as verify uses."""

    def __init__(self) -> None:
        self.path = Path("capture")
        self.manifest = Manifest(complete=True, step=3)
        self.calls: list[Call] = []
        self.blobs: dict[str, torch.Tensor] = {}

    def record(
        self, name: str, tensor: torch.Tensor, *, stored: bool = True, storage: int = -1
    ) -> TensorRecord:
        blob = f"blob{len(self.blobs)}"
        for known, other in self.blobs.items():
            if other is tensor:
                blob = known
        self.blobs[blob] = tensor
        values = tensor.detach().double()
        return TensorRecord(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=tensor.storage_offset(),
            storage=storage,
            blob=blob if stored else None,
            digest=Digest(
                count=tensor.numel(),
                sum=float(values.sum()),
                abs_sum=float(values.abs().sum()),
                sq_sum=float((values * values).sum()),
                min=float(values.min()) if tensor.numel() else None,
                max=float(values.max()) if tensor.numel() else None,
                nan=0,
                pos_inf=0,
                neg_inf=0,
                hash=f"{hash(blob) & 0xFFFFFFFFFFFFFFFF:016x}",
            ),
        )

    def add(self, key: str, op: str, *, kind: str = "module", stored: bool = True, **fields: Any) -> Call:
        """Add a call; tensor fields are given as {name: tensor}."""
        for section in ("inputs", "outputs", "params", "grad_outputs", "grad_inputs"):
            tensors = fields.pop(section, {})
            fields[section] = tuple(
                self.record(name, tensor, stored=stored) for name, tensor in tensors.items()
            )
        if kind == "module":
            fields.setdefault("module", key)
            fields.setdefault("module_class", op)
        call = Call(index=len(self.calls), key=key, kind=kind, op=op, step=3, **fields)  # type: ignore[arg-type]
        self.calls.append(call)
        return call

    def find(self, glob: str) -> list[Call]:
        return [
            call
            for call in self.calls
            if any(fnmatchcase(name, glob) for name in (call.key, call.op, call.module, call.module_class))
        ]

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        assert record.blob is not None
        return self.blobs[record.blob]

    def tensors(self, call: Call) -> dict[str, torch.Tensor]:
        parts = ("inputs", "params", "outputs", "grad_outputs", "grad_inputs")
        return {f"{part}/{r.name}": self.tensor(r) for part in parts for r in getattr(call, part) if r.blob}


def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return x * weight + eps


def sample(
    shape: tuple[int, ...], dtype: torch.dtype, generator: Any, device: str
) -> tuple[torch.Tensor, ...]:
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape[-1], dtype=dtype)


SPEC = KernelSpec(
    name="offset_rmsnorm",
    reference=norm,
    target=norm,
    sample=sample,
    inputs=("x", "weight"),
    outputs=("y",),
    grads=("x", "weight"),
    attrs={"eps": 1e-6},
    kind="reduction",
    shapes=((4, 8), (2, 4, 8)),
    dtypes=("float32", "bfloat16"),
    sites=("OffsetRMSNorm", "demo::norm"),
)


def spec(**changes: Any) -> KernelSpec:
    return replace(SPEC, **changes)


def add_norm(capture: FakeCapture, key: str, *, scale: float = 1.0, **fields: Any) -> Call:
    x = scale * torch.randn(2, 4, 8)
    defaults: dict[str, Any] = {
        "inputs": {"0": x},
        "params": {"weight": torch.randn(8)},
        "outputs": {"0": torch.randn(2, 4, 8)},
        "grad_outputs": {"0": torch.randn(2, 4, 8)},
        "grad_inputs": {"0": torch.randn(2, 4, 8), "weight": torch.randn(8)},
        "attrs": {"eps": 1e-5},
    }
    return capture.add(key, "OffsetRMSNorm", **{**defaults, **fields})


def bound(capture: FakeCapture, of: KernelSpec = SPEC, **options: Any) -> bind.Bindings:
    return bind.bind_cases(cast(Any, capture), of, **options)


def test_a_module_call_gives_every_part_of_a_case() -> None:
    capture = FakeCapture()
    call = add_norm(capture, "layers.0.norm")
    result = bound(capture)
    (case,) = result.cases
    assert case.name == "captured layers.0.norm (step 3)"
    assert (case.family, case.dtype, dict(case.attrs)) == ("captured", "float32", {"eps": 1e-5})
    assert case.inputs[0] is capture.tensor(call.inputs[0])
    assert case.inputs[1] is capture.tensor(call.params[0])
    assert case.grad_outputs[0] is capture.tensor(call.grad_outputs[0])
    assert case.recorded is not None
    assert case.recorded.outputs["y"] is capture.tensor(call.outputs[0])
    assert case.recorded.grads["x"] is capture.tensor(call.grad_inputs[0])
    assert case.recorded.grads["weight"] is capture.tensor(call.grad_inputs[1])
    assert case.notes == () and result.left_out == ()


def test_names_win_over_order_and_dotted_parameters_match() -> None:
    capture = FakeCapture()
    x, other, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    call = capture.add("norm", "OffsetRMSNorm", inputs={"0": other, "x": x}, params={"inner.weight": weight})
    found = match_inputs(call, spec(inputs=("x", "residual", "weight"), grads=()))
    assert {name: record.name for name, record in found.items()} == {
        "x": "x",
        "residual": "0",
        "weight": "inner.weight",
    }


def test_op_arguments_bind_in_schema_order() -> None:
    capture = FakeCapture()
    tensors = {"10": torch.randn(8), "2": torch.randn(4, 8)}
    call = capture.add("norm/op_0", "demo::norm.default", kind="op", inputs=tensors)
    found = match_inputs(call, SPEC)
    assert (found["x"].name, found["weight"].name) == ("2", "10")


def test_a_launch_binds_by_the_kernels_argument_names() -> None:
    capture = FakeCapture()
    tensors = {"y_ptr": torch.zeros(4, 8), "W_ptr": torch.randn(8), "x_ptr": torch.randn(4, 8)}
    call = capture.add("k", "_fwd", kind="launch", inputs=tensors)
    found = match_inputs(call, spec(inputs=("x", "w"), grads=()))
    assert (found["x"].name, found["w"].name) == ("x_ptr", "W_ptr")
    with pytest.raises(SpecError, match="nothing for weight; give the spec a `bind`"):
        match_inputs(call, SPEC)


def test_what_does_not_fit_says_what_the_call_has() -> None:
    capture = FakeCapture()
    add_norm(capture, "norm", inputs={"0": torch.randn(4, 8), "1": torch.randn(3)})
    with pytest.raises(SpecError, match=r"no input for argument 1; give the spec a `bind`") as caught:
        bound(capture)
    assert "argument 1 float32[3]" in str(caught.value) and "parameter weight float32[8]" in str(caught.value)


def test_bind_of_the_spec_overrides() -> None:
    capture = FakeCapture()
    inputs, outputs = {"0": torch.randn(4, 8), "1": torch.randn(3)}, {"0": torch.randn(4, 8)}
    call = add_norm(capture, "norm", inputs=inputs, outputs=outputs, grad_outputs=outputs)

    def by_name(view: bind.CapturedCall) -> dict[str, Any]:
        return {"x": view.inputs["0"], "weight": view.params["weight"] + 1, "eps": 0.5}

    (case,) = bound(capture, spec(bind=by_name)).cases
    assert case.attrs == {"eps": 0.5}
    assert case.recorded is not None
    # A weight that `bind` made has no recorded gradient to compare with; x has.
    assert set(case.recorded.grads) == {"x"}
    assert torch.equal(case.inputs[1], capture.tensor(call.params[0]) + 1)

    def pair(view: bind.CapturedCall) -> Any:
        return (view.inputs["0"], view.params["weight"]), {"eps": 2.0}

    (case,) = bound(capture, spec(bind=pair)).cases
    assert case.attrs == {"eps": 2.0}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda view: {"x": view.inputs["0"]}, "must return one tensor for each of"),
        (lambda view: view.inputs["missing"], "`bind` raised KeyError"),
        (lambda view: {"x": view.inputs["0"], "weight": view.inputs["0"], "epz": 1}, "epz"),
    ],
)
def test_a_bind_that_does_not_fit_is_named(result: Any, expected: str) -> None:
    capture = FakeCapture()
    add_norm(capture, "norm")
    with pytest.raises(SpecError, match=expected):
        bound(capture, spec(bind=result))


def test_undeclared_dtypes_and_ranks_are_refused_only_when_nothing_fits() -> None:
    capture = FakeCapture()
    add_norm(capture, "half", inputs={"0": torch.randn(2, 4, 8).half()})
    with pytest.raises(
        UsageError, match=r"half: dtype float16 is not declared \(declared: float32, bfloat16\)"
    ):
        bound(capture)
    add_norm(capture, "fits")
    result = bound(capture)
    assert [call.key for call in result.calls] == ["fits"]
    assert result.left_out == ("half: dtype float16 is not declared (declared: float32, bfloat16)",)
    capture.calls.pop(0)
    with pytest.raises(UsageError, match="other numbers of dimensions"):
        bound(capture, spec(shapes=((2, 4, 8, 8),)))
    # More leading dimensions than declared are the usual difference between a test and a run.
    assert len(bound(capture, spec(shapes=((4, 8),))).cases) == 1


def test_no_matching_site_lists_what_the_capture_has() -> None:
    capture = FakeCapture()
    capture.add("a", "RMSNorm", inputs={"0": torch.randn(4)})
    capture.add("a/op_0", "aten::mm.default", kind="op", inputs={"0": torch.randn(4)})
    with pytest.raises(UsageError) as caught:
        bound(capture)
    assert "did you mean RMSNorm?" in str(caught.value) and "aten" not in str(caught.value)
    empty = FakeCapture()
    with pytest.raises(UsageError, match="no module calls, custom ops or Triton launches"):
        bound(empty)


def test_digests_alone_cannot_be_judged() -> None:
    capture = FakeCapture()
    add_norm(capture, "norm", stored=False)
    with pytest.raises(UsageError, match=r"not their tensors .*recapture with --ops offset_rmsnorm"):
        bound(capture)


def test_the_outermost_call_is_judged_and_recompute_is_not() -> None:
    capture = FakeCapture()
    outer = add_norm(capture, "norm")
    capture.add("norm/op_0", "aten::mul", kind="op", parent=outer.index, inputs={"0": torch.randn(4)})
    inputs = {"0": torch.randn(4, 8), "1": torch.randn(8)}
    capture.add("norm/op_1", "demo::norm.default", kind="op", parent=1, inputs=inputs)
    add_norm(capture, "norm again", phase="recompute")
    found = sites.find_calls(cast(Any, capture), SPEC)
    assert [call.key for call in found] == ["norm"]


def test_a_kernel_inside_the_module_gets_no_record_of_the_module() -> None:
    capture = FakeCapture()
    add_norm(capture, "norm", outputs={"0": torch.randn(2, 4, 5)}, grad_outputs={"0": torch.randn(2, 4, 5)})

    def inside(view: bind.CapturedCall) -> dict[str, Any]:
        return {"x": view.inputs["0"] * 2, "weight": view.params["weight"]}

    (case,) = bound(capture, spec(bind=inside)).cases
    assert case.recorded is None
    assert case.grad_outputs[0].shape == (2, 4, 8)
    assert any("takes the inputs out of OffsetRMSNorm" in note for note in case.notes)
    with pytest.raises(SpecError, match="the reference raised RuntimeError"):
        bound(capture, spec(bind=lambda view: {"x": view.inputs["0"], "weight": torch.ones(3)}))


def test_another_op_name_is_a_glob_over_the_capture() -> None:
    capture = FakeCapture()
    add_norm(capture, "layers.0.norm")
    add_norm(capture, "layers.1.norm")
    found = sites.find_calls(cast(Any, capture), SPEC, op="layers.1.*")
    assert [call.key for call in found] == ["layers.1.norm"]


def test_the_name_of_a_spec_without_sites_matches_whatever_its_spelling() -> None:
    capture = FakeCapture()
    add_norm(capture, "norm")
    assert len(sites.find_calls(cast(Any, capture), spec(sites=()))) == 1


def test_many_calls_are_chosen_for_variety_and_the_rest_is_counted() -> None:
    capture = FakeCapture()
    for layer in range(6):
        add_norm(capture, f"layers.{layer}.attention_norm", scale=100.0 if layer == 3 else 1.0)
        add_norm(capture, f"layers.{layer}.ffn_norm")
    add_norm(capture, "norm")
    result = bound(capture, max_calls=6)
    keys = [call.key for call in result.calls]
    assert {"layers.0.attention_norm", "layers.0.ffn_norm", "norm"} < set(keys)
    assert {"layers.5.attention_norm", "layers.5.ffn_norm"} < set(keys)
    assert "layers.3.attention_norm" in keys  # the largest values
    assert keys == sorted(keys, key=[call.key for call in capture.calls].index)
    assert result.left_out == ("7 calls beyond --max-calls 6",)


def test_identical_inputs_are_judged_once() -> None:
    capture = FakeCapture()
    x, weight = torch.randn(2, 4, 8), torch.randn(8)
    for key in ("a", "b"):
        add_norm(capture, key, inputs={"0": x}, params={"weight": weight}, grad_outputs={})
    ranked = sites.rank(sites.find_calls(cast(Any, capture), SPEC))
    assert [call.key for call in ranked.calls] == ["a"]
    assert ranked.left_out == ("1 call with inputs identical to a judged one",)


def test_missing_upstream_gradients_and_attrs_are_said() -> None:
    capture = FakeCapture()
    add_norm(capture, "norm", grad_outputs={}, attrs={})
    (case,) = bound(capture, seed=5).cases
    assert case.attrs == {"eps": 1e-6}
    assert case.grad_outputs[0].shape == (2, 4, 8)
    assert any("random one (seed 5)" in note for note in case.notes)
    assert any("eps was not recorded" in note for note in case.notes)
    (again,) = bound(capture, seed=5).cases
    assert torch.equal(case.grad_outputs[0], again.grad_outputs[0])


def test_an_output_without_gradient_beside_others_gets_zeros() -> None:
    capture = FakeCapture()
    out = {"0": torch.randn(4, 8), "1": torch.randn(4)}
    add_norm(
        capture, "norm", inputs={"0": torch.randn(4, 8)}, outputs=out, grad_outputs={"0": torch.randn(4, 8)}
    )
    (case,) = bound(capture, spec(outputs=("y", "rstd"))).cases
    assert torch.equal(case.grad_outputs[1], torch.zeros(4))


def test_moving_between_devices_keeps_layout_and_sharing() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    view = base.t()[1:5:2]
    moved = bind._to_device({"inputs/0": base, "inputs/1": view, "inputs/2": torch.ones(3)}, "meta")
    same = moved["inputs/1"]
    assert (same.stride(), same.storage_offset(), same.shape) == (
        view.stride(),
        view.storage_offset(),
        view.shape,
    )
    assert same.untyped_storage()._cdata == moved["inputs/0"].untyped_storage()._cdata
    assert moved["inputs/2"].untyped_storage()._cdata != same.untyped_storage()._cdata
