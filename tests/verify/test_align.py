"""Alignment: laws by hypothesis, and the drifts that keys cannot survive."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import Options, decoder

from bridge.capture.record import Call, Digest, TensorRecord
from bridge.errors import UsageError
from bridge.verify.align import Alignment, align
from bridge.verify.columns import Pool
from bridge.verify.diff_document import MATCH_KINDS
from bridge.verify.intake import columns
from bridge.verify.overrides import read_overrides

OPS = ("aten::mm.default", "aten::add.Tensor", "aten::mul.Tensor", "aten::silu.default")


def a_call(
    index: int, module: str, op: str, shape: tuple[int, ...], contents: int, key: str, phase: str
) -> Call:
    digest = Digest(
        count=4, sum=1.0 * contents, abs_sum=4.0, sq_sum=5.0, min=-1.0, max=2.0, nan=0, pos_inf=0, neg_inf=0,
        hash=f"{contents + 1:016x}",
    )  # fmt: skip
    record = TensorRecord(name="0", dtype="float32", shape=shape, digest=digest)
    return Call(
        index=index,
        key=key,
        kind="op",
        op=op,
        step=1,
        phase=phase,  # type: ignore[arg-type]
        module=module,
        inputs=(record,),
        outputs=(
            msgspec.structs.replace(
                record, digest=msgspec.structs.replace(digest, hash=f"{contents + 7:016x}")
            ),
        ),
    )


@st.composite
def runs(draw: st.DrawFn) -> list[Call]:
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(("layers.0.norm", "layers.0.w1", "layers.1.norm", "")),
                st.sampled_from(OPS),
                st.sampled_from(((2, 2), (4,), ())),
                st.sampled_from(("forward", "backward")),
            ),
            max_size=16,
        )
    )
    counts: dict[str, int] = {}
    calls = []
    for index, (module, op, shape, phase) in enumerate(rows):
        count = counts.get(module, 0)
        counts[module] = count + 1
        key = f"{module}/op_{count}_{op[6:8]}"
        calls.append(a_call(index, module, op, shape, 100 * index, key, phase))
    return calls


def aligned(a: list[Call], b: list[Call], overrides: dict[str, str] | None = None) -> Alignment:
    pool = Pool()
    return align(columns(a, pool), columns(b, pool), overrides)


def pairs(alignment: Alignment) -> set[tuple[int, int]]:
    return set(zip(alignment.a.tolist(), alignment.b.tolist(), strict=True))


@settings(max_examples=40, deadline=None)
@given(runs())
def test_a_run_aligned_with_itself_is_the_identity(calls: list[Call]) -> None:
    alignment = aligned(calls, calls)
    assert pairs(alignment) == {(place, place) for place in range(len(calls))}
    assert {MATCH_KINDS[number] for number in alignment.match.tolist()} <= {"key"}


@settings(max_examples=40, deadline=None)
@given(runs(), st.randoms(use_true_random=False))
def test_reordered_unrelated_calls_keep_their_partners(calls: list[Call], random: object) -> None:
    order = list(range(len(calls)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = [msgspec.structs.replace(calls[place], index=at) for at, place in enumerate(order)]
    found = aligned(calls, moved)
    same = {(place, at) for at, place in enumerate(order)}
    equal = [pair for pair in pairs(found) if pair in same]
    # Within one module the op sequences differ now; equal contents decide wherever an op occurs again.
    for at_a, at_b in pairs(found):
        assert calls[at_a].op == moved[at_b].op
    modules = {call.module for call in calls}
    if all(len({call.op for call in calls if call.module == module}) <= 1 for module in modules):
        assert len(equal) == len(calls)


@pytest.mark.parametrize("order", [(0, 1, 3, 2, 5, 4), (1, 0, 3, 2, 5, 4), (0, 1, 3, 5, 2, 4)])
@pytest.mark.parametrize("odd", range(6))
def test_a_call_of_another_shape_may_move_past_the_others(order: tuple[int, ...], odd: int) -> None:
    shapes = [(4,) if place == odd else (2, 2) for place in range(6)]
    calls = [a_call(i, "norm", OPS[0], shapes[i], 100 * i, f"norm/op_{i}_mm", "forward") for i in range(6)]
    moved = [msgspec.structs.replace(calls[place], index=at) for at, place in enumerate(order)]
    assert pairs(aligned(calls, moved)) == {(place, at) for at, place in enumerate(order)}


@settings(max_examples=60, deadline=None)
@given(runs(), runs())
def test_swapping_the_sides_swaps_the_pairs(a: list[Call], b: list[Call]) -> None:
    there, back = aligned(a, b), aligned(b, a)
    assert pairs(there) == {(left, right) for right, left in pairs(back)}


@settings(max_examples=30, deadline=None)
@given(runs(), runs())
def test_every_call_is_paired_once_or_listed(a: list[Call], b: list[Call]) -> None:
    found = aligned(a, b)
    assert sorted([*found.a.tolist(), *found.only_a.tolist()]) == list(range(len(a)))
    assert sorted([*found.b.tolist(), *found.only_b.tolist()]) == list(range(len(b)))


def kinds_of(a: list[Call], b: list[Call]) -> dict[str, str]:
    found = aligned(a, b)
    return {
        a[left].key + " > " + b[right].key: MATCH_KINDS[number]
        for left, right, number in zip(found.a.tolist(), found.b.tolist(), found.match.tolist(), strict=True)
    }


def test_an_extra_op_does_not_shift_later_pairs() -> None:
    a, b = decoder(Options()).calls, decoder(Options(extra=True)).calls
    found = kinds_of(a, b)
    assert found["layers.1.norm/op_1_pow > layers.1.norm/op_2_pow"] == "moved"
    assert found["layers.2.norm/op_1_pow > layers.2.norm/op_1_pow"] == "key"
    assert len(found) == len(a)


def test_the_deleted_one_of_three_equal_ops_is_found_by_contents() -> None:
    a = [a_call(place, "m", OPS[2], (4,), 100 * place, f"m/op_{place}_mul", "forward") for place in range(3)]
    b = [msgspec.structs.replace(a[place], index=at, key=f"m/op_{at}_mul") for at, place in enumerate((1, 2))]
    assert pairs(aligned(a, b)) == {(1, 0), (2, 1)}


def test_a_recomputed_module_name_that_drifted_is_found_by_its_leaf() -> None:
    a = [
        a_call(
            0, "layers.1.feed_forward.w1", OPS[0], (4,), 1, "layers.1.feed_forward.w1/op_0_mm", "recompute"
        )
    ]
    b = [a_call(0, "feed_forward.w1", OPS[0], (4,), 900, "feed_forward.w1/op_0_mm", "recompute")]
    assert list(kinds_of(a, b).values()) == ["moved"]


def test_producers_pair_what_neither_name_nor_contents_do() -> None:
    first = a_call(0, "m", OPS[0], (4,), 1, "m/op_0_mm", "forward")
    second = a_call(1, "left.one", OPS[1], (4,), 200, "left.one/op_0_add", "forward")
    second = msgspec.structs.replace(second, inputs=(msgspec.structs.replace(second.inputs[0], producer=0),))
    moved = a_call(1, "right.two", OPS[1], (4,), 900, "right.two/op_0_add", "forward")
    moved = msgspec.structs.replace(moved, inputs=(msgspec.structs.replace(moved.inputs[0], producer=0),))
    assert kinds_of([first, second], [first, moved])["left.one/op_0_add > right.two/op_0_add"] == "structure"


def test_a_renamed_collective_is_paired_in_its_place() -> None:
    a = [a_call(0, "m", "_c10d_functional::all_reduce.default", (4,), 1, "m/op_0_all_reduce", "backward")]
    b = [a_call(0, "m", "c10d::allreduce_.default", (4,), 1, "m/op_0_allreduce_", "backward")]
    assert list(kinds_of(a, b).values()) == ["renamed"]


def test_a_fused_op_stands_for_the_eager_ones_at_their_boundary() -> None:
    a, b = decoder(Options()).calls, decoder(Options(norm="fused")).calls
    found = aligned(a, b)
    number = next(n for n, kind in enumerate(found.match.tolist()) if MATCH_KINDS[kind] == "module")
    assert a[int(found.a[number])].key == "layers.1.norm/op_7_mul"
    assert b[int(found.b[number])].key == "layers.1.norm/op_0_fused_norm"
    assert [len(run) for run in found.runs[number]] == [8, 1]


def test_overrides_come_first(tmp_path: Path) -> None:
    calls = decoder(Options()).calls
    file = tmp_path / "pairs.csv"
    file.write_text("# known\nkey_a,key_b\n\nlayers.0.norm/op_1_pow,layers.1.norm/op_1_pow\n")
    found = aligned(calls, calls, read_overrides(file))
    kinds = {
        (calls[left].key, calls[right].key): MATCH_KINDS[number]
        for left, right, number in zip(found.a.tolist(), found.b.tolist(), found.match.tolist(), strict=True)
    }
    assert kinds["layers.0.norm/op_1_pow", "layers.1.norm/op_1_pow"] == "override"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m/op_0_mm\n", "key_a,key_b"),
        ("m/a,m/b,m/c\n", "key_a,key_b"),
        ("m/a,m/b\nm/a,m/c\n", "once"),
    ],
)
def test_bad_overrides_name_the_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_overrides(file)


def test_an_override_of_an_unknown_key_names_near_misses() -> None:
    calls = decoder(Options(layers=1, at=0)).calls
    with pytest.raises(UsageError, match=r"run A does not have; did you mean layers\.0\.norm/op_1_pow"):
        aligned(calls, calls, {"layers.0.norm/op_1_pov": "layers.0.norm/op_1_pow"})


def test_different_models_leave_everything_unpaired() -> None:
    a = [a_call(0, "encoder.a", OPS[0], (4,), 1, "encoder.a/op_0_mm", "forward")]
    b = [a_call(0, "decoder.b", OPS[1], (2, 2), 2, "decoder.b/op_0_add", "forward")]
    found = aligned(a, b)
    assert (len(found), found.only_a.tolist(), found.only_b.tolist()) == (0, [0], [0])
    empty = aligned([], [])
    assert len(empty) == 0 and isinstance(empty.a, np.ndarray)
