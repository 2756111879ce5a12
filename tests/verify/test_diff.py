"""The document of a diff: mismatches, the table, drill-down, and what it does not claim."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from recorded import Options, Recorder, decoder

from bridge.capture.record import Call
from bridge.errors import CaptureError, NotACaptureError, UsageError
from bridge.verify.diff import diff_captures, write_diff
from bridge.verify.diff_document import MATCH_KINDS, STATUSES, DiffDocument
from bridge.verify.diff_table import short_numbers


def diff(
    a: Options,
    b: Options,
    left: dict[str, Any] | None = None,
    right: dict[str, Any] | None = None,
    **more: Any,
):  # type: ignore[no-untyped-def]
    return diff_captures(decoder(a).run("A", **(left or {})), decoder(b).run("B", **(right or {})), **more)


def test_the_document_survives_json(tmp_path: Path) -> None:
    document = diff(Options(), Options(eps=1e-2))
    write_diff(document, tmp_path / "deep" / "diff.json")
    data = (tmp_path / "deep" / "diff.json").read_bytes()
    assert msgspec.json.decode(data, type=DiffDocument) == document
    assert b"NaN" not in data and b"Infinity" not in data


def test_an_unwritable_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="choose another --report"):
        write_diff(diff(Options(), Options()), tmp_path / "file" / "diff.json")


def test_rows_are_in_execution_order_and_complete() -> None:
    document = diff(Options(), Options(norm="fused"))
    table = document.table
    indices = [index for index in table.index_b if index >= 0]
    assert indices == sorted(indices)
    assert len(table) == document.coverage.pairs + document.coverage.only_a + document.coverage.only_b
    columns = [getattr(table, name) for name in table.__struct_fields__ if name != "pool"]
    assert {len(column) for column in columns} == {len(table)}
    kinds = [MATCH_KINDS[number] for number in table.match]
    assert kinds.count("module") == 1 and kinds.count("") == 7
    statuses = [STATUSES[number] for number in table.status]
    assert statuses.count("only a") == 7


def test_the_first_differences_are_rows() -> None:
    document = diff(Options(), Options(eps=1e-2))
    row = document.first_divergence
    assert row is not None and row == document.first_bit_difference
    assert document.table.pool[document.table.key_b[row]] == "layers.1.norm/op_3_add"
    detail = next(detail for detail in document.details if detail.row == row)
    assert detail.arguments == {"other": ("1e-06", "0.01")}
    assert detail.producers_b == ("layers.1.norm/op_2_mean",)
    assert detail.how_matched == "same key"


def test_a_wrong_backward_counts_where_the_outputs_are_equal() -> None:
    x, upstream = torch.ones(4), torch.full((4,), 3.0)

    def run(gradient: float) -> Recorder:
        rec = Recorder()
        module = Call(
            index=0,
            key="layers.0.norm",
            kind="module",
            op="Norm",
            step=1,
            module="layers.0.norm",
            module_class="Norm",
            inputs=(rec.record("0", x),),
            outputs=(rec.record("0", 2 * x),),
            grad_outputs=(rec.record("0", upstream),),
            grad_inputs=(rec.record("0", gradient * upstream),),
        )
        rec.calls.append(module)
        return rec

    document = diff_captures(run(1.0).run("A"), run(1.5).run("B"))
    assert document.suspects[0].phase == "backward"
    assert STATUSES[document.table.status[0]] == "differs"
    assert document.table.in_difference == [0.0]
    assert document.table.out_difference == [0.5]


@pytest.mark.parametrize(
    ("left", "right", "what"),
    [({"step": 1, "steps": (1,)}, {"step": 2, "steps": (2,)}, "step"), ({"seed": 0}, {"seed": 1}, "seed")],
)
def test_runs_that_should_not_be_compared_are_refused(
    left: dict[str, Any], right: dict[str, Any], what: str
) -> None:
    if what == "step":
        later = decoder(Options())
        later.calls[:] = [msgspec.structs.replace(call, step=2) for call in later.calls]
        sides = decoder(Options()).run("A", **left), later.run("B", **right)
    else:
        sides = decoder(Options()).run("A", **left), decoder(Options()).run("B", **right)
    with pytest.raises(UsageError, match=rf"{what}: .* in A, .* in B .*--allow-mismatch"):
        diff_captures(*sides)
    document = diff_captures(*sides, allow_mismatch=True)
    assert [mismatch.what for mismatch in document.mismatches] == [what]
    assert document.outcome == "IDENTICAL"


def test_another_dtype_is_refused() -> None:
    import torch

    with pytest.raises(UsageError, match="dtype: float32 in A, bfloat16 in B"):
        diff(Options(), Options(dtype=torch.bfloat16))


def test_another_model_is_refused_and_then_nothing_matches() -> None:
    other = decoder(Options())
    other.calls[:] = [
        msgspec.structs.replace(call, module=f"encoder.{call.module}", key=f"encoder.{call.key}",
                                op="mylib::x.default", outputs=())
        for call in other.calls
    ]  # fmt: skip
    with pytest.raises(UsageError, match="model"):
        diff_captures(decoder(Options()).run("A"), other.run("B"))
    document = diff_captures(decoder(Options()).run("A"), other.run("B"), allow_mismatch=True)
    assert document.outcome == "NOTHING MATCHED"


def test_versions_and_incompleteness_are_said_and_not_refused() -> None:
    document = diff(
        Options(),
        Options(),
        {"versions": {"torch": "2.11"}},
        {"versions": {"torch": "2.13"}, "complete": False},
    )
    assert {mismatch.what for mismatch in document.mismatches} == {"version of torch", "completeness"}


def test_a_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; run A must be"):
        diff_captures(tmp_path / "no", tmp_path / "no")


def test_numbers_are_short_and_exact_enough() -> None:
    import numpy as np

    values = np.array([0.0, 1.23456789e-7, -98765.4321, np.nan, np.inf, 3e300, 1e-300, 2.0])
    assert short_numbers(values) == [0.0, 1.235e-7, -98770.0, None, None, 3e300, 1e-300, 2.0]


def test_digests_alone_need_no_torch() -> None:
    import subprocess

    code = (
        "import sys; from bridge.verify.diff import diff_captures; from bridge.cli import diff, scan, ab; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_batches_of_other_sizes_are_said_and_blame_nobody() -> None:
    def run(rows: int) -> Recorder:
        recorder = Recorder()
        x = torch.linspace(-1, 1, rows * 8).reshape(rows, 8)
        made = recorder.op("aten::mm.default", torch.mm, x, torch.ones(8, 8))
        shown = recorder.record("0", x), recorder.record("0", made)
        recorder.calls.append(
            Call(
                index=1, key="<root>", kind="module", op="Model", step=1, inputs=shown[:1], outputs=shown[1:]
            )
        )
        return recorder

    document = diff_captures(run(2).run("A"), run(4).run("B"))
    assert document.outcome == "INCONCLUSIVE" and not document.suspects
    assert "batches of other sizes in this step (2x8 in A, 4x8 in B)" in document.summary
    assert [m.what for m in document.mismatches if m.what == "batch"] == ["batch"]


def test_an_input_that_only_one_run_is_given_is_no_other_data() -> None:
    def run(*names: str) -> Recorder:
        recorder = Recorder()
        x = torch.linspace(-1, 1, 16).reshape(2, 8)
        recorder.op("aten::mm.default", torch.mm, x, torch.ones(8, 8))
        given = tuple(recorder.record(name, x) for name in names)
        recorder.calls.append(Call(index=1, key="<root>", kind="module", op="Model", step=1, inputs=given))
        return recorder

    document = diff_captures(run("0").run("A"), run("0", "mask").run("B"))
    assert "batch" not in {mismatch.what for mismatch in document.mismatches}


def test_other_sizes_lead_and_no_replacement_of_an_op_is_named() -> None:
    def run(rows: int, eps: float) -> Recorder:
        recorder = decoder(Options(eps=eps))
        given = tuple(recorder.record(name, torch.ones(rows, 8)) for name in ("tokens", "positions"))
        recorder.calls.insert(
            0, Call(index=999, key="<root>", kind="module", op="Model", step=1, inputs=given)
        )
        return recorder

    same = diff_captures(run(2, 1e-6).run("A"), run(2, 1e-2).run("B"))
    assert same.outcome == "DIVERGED" and same.suspects
    document = diff_captures(run(2, 1e-6).run("A"), run(4, 1e-2).run("B"))
    assert document.outcome == "INCONCLUSIVE" and not document.suspects
    assert document.summary.startswith(
        "the runs saw batches of other sizes in this step (2x8 in A, 4x8 in B)"
    )
    assert not document.coverage.by_origin


@pytest.mark.parametrize("facts", [{"complete": False}, {"problems": ("the disk was full",)}])
def test_a_part_of_a_run_cannot_agree(facts: dict[str, Any]) -> None:
    part = decoder(Options())
    del part.calls[len(part.calls) // 2 :]
    whole = decoder(Options()).run("A")
    document = diff_captures(whole, part.run("B", **facts))
    assert document.outcome == "INCONCLUSIVE"
    said = f"run B is incomplete, with {len(part.calls)} calls where A has {len(whole.calls)}: "
    assert document.summary.startswith(said)
    assert "have no counterpart" in document.summary
    assert facts.get("problems", ("did not finish",))[0] in document.summary
    assert diff(Options(), Options(eps=1e-2), right=facts).outcome == "DIVERGED"


def test_settings_that_differ_are_listed_and_bounded() -> None:
    left = {"model": {"dim": 96, "layers": [{"eps": 1e-6}]}, "seed": 0}
    right = {"model": {"dim": 128, "layers": [{"eps": 1e-6}]}, "seed": 0, "compile": True}
    document = diff(Options(), Options(), {"config": left}, {"config": right})
    assert document.outcome == "IDENTICAL"
    (config,) = document.mismatches
    assert (config.what, config.meaning, config.refused) == ("config", "2 settings differ", False)
    assert config.a == "model.dim=96, compile=not set" and config.b == "model.dim=128, compile=True"
    many = [{str(key): key + offset for key in range(9)} for offset in (0, 1)]
    (config,) = diff(Options(), Options(), {"config": many[0]}, {"config": many[1]}).mismatches
    assert config.a.count("=") == 5 and config.meaning == "9 settings differ, of which 5 are shown"
    assert not diff(Options(), Options(), {"config": left}, {"config": left}).mismatches


def test_stored_tensors_that_were_not_read_are_not_covered() -> None:
    options = Options(keep=True)
    document = diff(options, options)
    assert document.a.with_tensors == document.a.calls
    (said,) = [text for text in document.coverage.not_covered if "no stored tensor was read" in text]
    assert "bridge inspect --check /nowhere/A" in said and "bridge inspect --check /nowhere/B" in said
    assert not any("stored tensor" in text for text in diff(Options(), Options()).coverage.not_covered)
    said_of = diff(options, options, replay=False).coverage.not_covered
    assert "no call was replayed" in said_of


def test_calls_with_one_stored_tensor_count_as_with_tensors() -> None:
    recorder = decoder(Options(keep=True))
    recorder.calls[:] = [
        msgspec.structs.replace(
            call, inputs=tuple(msgspec.structs.replace(record, blob=None) for record in call.inputs)
        )
        for call in recorder.calls
    ]
    document = diff_captures(recorder.run("A"), decoder(Options()).run("B"))
    assert (document.a.with_tensors, document.b.with_tensors) == (len(recorder.calls), 0)


def test_a_file_that_is_no_log_is_told_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "titan.log").write_text("[titan] step: 1 loss: 5.0\n")
    with pytest.raises(NotACaptureError, match='begins with "Total captured activations: N"'):
        diff_captures(tmp_path / "titan.log", tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match=f"give the folder {tmp_path}$"):
        diff_captures(tmp_path / "manifest.json", tmp_path)
