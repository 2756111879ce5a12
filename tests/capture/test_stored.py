"""Calls that are decoded when looked at: the same calls, the same errors as when all are read at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bridge.capture.lines import ContentLine
from bridge.capture.record import Call, Digest, Manifest, RankFiles, TensorRecord
from bridge.capture.store import Capture, load_capture
from bridge.capture.stored import StoredCalls, stored_calls
from bridge.errors import CorruptCaptureError
from tests.capture.conftest import Trainer


def digest(value: float) -> Digest:
    return Digest(
        count=4, sum=value, abs_sum=value, sq_sum=value, min=0.0, max=value, nan=1, pos_inf=0, neg_inf=0,
        hash=f"{int(value * 64):016x}",
    )  # fmt: skip


def write(folder: Path, ranks: dict[int, list[Call]], contents: list[ContentLine]) -> Capture:
    listed = []
    for rank, calls in ranks.items():
        place = folder / f"rank_{rank:05d}"
        place.mkdir(parents=True)
        files = {}
        for name, lines in (("calls.jsonl", calls), ("contents.jsonl", contents)):
            data = msgspec.json.Encoder().encode_lines(lines)
            (place / name).write_bytes(data)
            files[f"{place.name}/{name}"] = hashlib.sha256(data).hexdigest()
        count = len({(call.step, call.index) for call in calls})
        listed.append(RankFiles(rank=rank, calls=count, files=files))
    manifest = Manifest(complete=True, step=1, steps=(1,), ranks=tuple(listed), world_size=len(ranks))
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return load_capture(folder)


def record(name: str, content: int, **fields: Any) -> TensorRecord:
    return TensorRecord(name=name, dtype="float32", shape=(4,), stride=(1,), content=content, **fields)


def call(index: int, **fields: Any) -> Call:
    known: dict[str, Any] = {"key": f"op_{index}", "kind": "op", "op": "aten::mm.default", "step": 1}
    return Call(index=index, **(known | fields))


CONTENTS = [
    ContentLine(content=0, digest=digest(1.0), blob="ab" * 16),
    ContentLine(content=1, digest=digest(2.0)),
]
SPREAD = TensorRecord(name="0", dtype="float32", shape=(4, 3), stride=(1, 0), content=0)


def test_lines_out_of_order_repeated_and_of_several_ranks_are_the_same_calls(tmp_path: Path) -> None:
    def of(rank: int) -> list[Call]:
        launch = call(
            2, kind="launch", rank=rank, mutated=("out", "same"),
            inputs=(record("out", 0), record("same", 1)), outputs=(record("out", 1), record("same", 1)),
        )  # fmt: skip
        module = call(0, kind="module", rank=rank, outputs=(record("0", 1),))
        return [
            call(1, rank=rank, inputs=(SPREAD,), outputs=(record("0", 7),)),
            module,
            launch,
            msgspec.structs.replace(module, grad_inputs=(record("weight", 0),)),
            call(0, step=2, rank=rank),
        ]

    capture = write(tmp_path / "c", {0: of(0), 1: of(1)}, CONTENTS)
    lazily = stored_calls(capture)
    assert isinstance(lazily, StoredCalls)
    assert len(lazily) == len(capture.calls) == 8
    assert list(lazily) == list(capture.calls)
    assert lazily[-1] == capture.calls[-1] and lazily[2:5] == list(capture.calls[2:5])
    spread = lazily[1].inputs[0].digest
    assert spread is not None and (spread.count, spread.sum, spread.nan) == (12, 3.0, 3)
    assert lazily[2].mutated == ("out",)


def test_a_real_step_is_the_same(capture_of: Callable[..., Capture]) -> None:
    trainer = Trainer()
    capture = capture_of(trainer.model, trainer.step)
    lazily = stored_calls(capture)
    assert isinstance(lazily, StoredCalls)
    assert list(lazily) == list(capture.calls)
    some = next(call for call in lazily if call.kind == "op" and call.inputs and call.inputs[0].blob)
    assert isinstance(capture.tensor(some.inputs[0]), torch.Tensor)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([call(0, rank=1)], "rank 1"),
        ([call(0, outputs=(TensorRecord(name="0", dtype="float32", shape=(2,), stride=(-1,)),))], "stride"),
        ([call(0, outputs=(TensorRecord(name="0", dtype="float32", shape=(1,) * 65),))], "shape"),
    ],
    ids=["rank", "stride", "dimensions"],
)
def test_contradictions_are_named_alike(calls: list[Call], said: str, tmp_path: Path) -> None:
    capture = write(tmp_path / "c", {0: calls}, CONTENTS)
    with pytest.raises(CorruptCaptureError, match=said) as eager:
        list(capture.calls)
    with pytest.raises(CorruptCaptureError) as lazily:
        list(stored_calls(capture))
    assert str(lazily.value) == str(eager.value)


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    capture = write(tmp_path / "c", {0: [call(0)]}, CONTENTS)
    with (tmp_path / "c" / "rank_00000" / "calls.jsonl").open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(CorruptCaptureError, match="sha256"):
        stored_calls(capture)


def test_a_torn_capture_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    capture = write(tmp_path / "c", {0: [call(0), call(1)]}, CONTENTS)
    manifest = msgspec.structs.replace(capture.manifest, complete=False, ranks=())
    (tmp_path / "c" / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with (tmp_path / "c" / "rank_00000" / "calls.jsonl").open("ab") as file:
        file.write(b'{"index":2,"key')
    assert [call.index for call in stored_calls(load_capture(tmp_path / "c"))] == [0, 1]
