"""Reading a capture back: layouts, aliasing, and every way a folder can be damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bridge.capture.record import Call, TensorRecord
from bridge.capture.store import Capture, load_capture
from bridge.errors import CaptureError, CorruptCaptureError, NotACaptureError

CaptureOf = Callable[..., Capture]


@pytest.fixture
def whole(capture_of: CaptureOf) -> Capture:
    x, weight = torch.randn(4, 6), torch.randn(6, 5)
    return capture_of(None, lambda: (x @ weight).relu_().sum(0))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced rows": lambda x: x[1:4],
    "sliced columns": lambda x: x[:, 2:5],
    "every other": lambda x: x[::2, ::3],
    "expanded": lambda x: x[:, :1].expand(8, 50),
    "expanded scalar": lambda x: x[3, 3].expand(2, 3),
    "permuted": lambda x: x.view(2, 4, 10).permute(2, 0, 1),
    "overlapping windows": lambda x: x.flatten().unfold(0, 4, 2),
    "0-dim": lambda x: x[2, 2],
    "empty": lambda x: x[:0],
    "size-one dimension": lambda x: x[:, None, 3:4],
}


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "int64", "bool", "complex64", "complex128"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_come_back_with_their_layout(layout: str, dtype: str, capture_of: CaptureOf) -> None:
    base = (3 * torch.randn(8, 10)).to(getattr(torch, dtype))
    x = LAYOUTS[layout](base)
    capture = capture_of(None, lambda: x.clone())
    (call,) = capture.find("clone")
    back = capture.tensor(call.inputs[0])
    assert torch.equal(back, x)
    assert back.stride() == x.stride()
    assert back.dtype == x.dtype
    if x.numel():
        assert back.storage_offset() == x.storage_offset()
    record = call.inputs[0]
    assert record.digest is not None
    assert record.digest.count == x.numel() * (2 if x.is_complex() else 1)


def test_float8_and_unsigned_types_round_trip(capture_of: CaptureOf) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint16, torch.uint32):
        x = torch.arange(16, dtype=torch.uint8).repeat(4).view(dtype)
        capture = capture_of(None, lambda x=x: x.clone())
        back = capture.tensor(capture.find("clone")[0].inputs[0])
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


def test_aliasing_between_a_calls_tensors_is_restored(capture_of: CaptureOf) -> None:
    base = torch.arange(10.0)
    capture = capture_of(None, lambda: torch.add(base[2:8], base[4:10]))
    tensors = capture.tensors(capture.find("add")[0])
    left, right = tensors["inputs/0"], tensors["inputs/1"]
    assert torch.equal(left, base[2:8])
    assert torch.equal(right, base[4:10])
    right[0] = 99
    assert left[2] == 99
    assert (left.storage_offset(), right.storage_offset()) == (2, 4)


def test_content_seen_twice_is_stored_once(capture_of: CaptureOf) -> None:
    x = torch.randn(100, 100)
    capture = capture_of(None, lambda: (x.t().clone(), x.view(-1).clone(), x.clone().add(1)))
    assert capture.manifest.stored_bytes <= 3 * 40_000 + 100


def test_find_by_every_name(whole: Capture) -> None:
    for name in ("aten::mm.default", "aten::mm", "mm", "*/op_*_mm"):
        assert [c.op for c in whole.find(name)] == ["aten::mm.default"]
    with pytest.raises(CaptureError, match="did you mean"):
        whole.call("<none>/op_0_mn")


def test_reading_calls_needs_no_torch(whole: Capture) -> None:
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom bridge.capture import load_capture\n"
        f"capture = load_capture({str(whole.path)!r})\n"
        "print(len(capture.calls), capture.calls[0].outputs[0].digest.hash)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == str(len(whole.calls))


def test_digest_only_says_how_to_get_more(capture_of: CaptureOf) -> None:
    capture = capture_of(None, lambda: torch.ones(3) + 1, patterns=())
    with pytest.raises(CaptureError, match=r"only a digest was kept.*--ops"):
        capture.tensor(capture.find("add")[0].inputs[0])


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACaptureError, match="does not exist"):
        load_capture(tmp_path / "nowhere")
    with pytest.raises(NotACaptureError, match=r"no manifest\.json"):
        load_capture(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCaptureError, match=r"manifest\.json"):
        load_capture(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 2}')
    with pytest.raises(CorruptCaptureError, match="version 2"):
        load_capture(tmp_path)


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "shard truncated": ("tensors-00000.safetensors", lambda b: b[:-10]),
    "shard header only": ("tensors-00000.safetensors", lambda b: b[:100]),
    "shard byte flipped": ("tensors-00000.safetensors", lambda b: b[:-3] + bytes([b[-3] ^ 1]) + b[-2:]),
    "calls truncated": ("calls.jsonl", lambda b: b[:-10]),
    "calls edited": ("calls.jsonl", lambda b: b.replace(b"aten::mm", b"aten::nn")),
    "contents edited": ("contents.jsonl", lambda b: b.replace(b'"nan":0', b'"nan":1', 1)),
    "blobs edited": ("blobs.jsonl", lambda b: b.replace(b'"begin":', b'"begin":1', 1)),
}


def use(path: Path) -> None:
    capture = load_capture(path)
    for call in capture.calls:
        capture.tensors(call)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_with_the_file(damage: str, whole: Capture) -> None:
    name, change = DAMAGE[damage]
    edit(whole.path / "rank_00000" / name, change)
    with pytest.raises(CorruptCaptureError, match=name.replace(".", r"\.")):
        use(whole.path)


@pytest.mark.parametrize(
    "name", ["tensors-00000.safetensors", "calls.jsonl", "contents.jsonl", "blobs.jsonl"]
)
def test_a_missing_file_is_named(name: str, whole: Capture) -> None:
    (whole.path / "rank_00000" / name).unlink()
    with pytest.raises(CorruptCaptureError, match=name.replace(".", r"\.")):
        use(whole.path)


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "calls.jsonl"])
def test_a_link_out_of_the_folder_is_not_followed(name: str, whole: Capture, tmp_path: Path) -> None:
    inside = whole.path / "rank_00000" / name
    outside = tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(CorruptCaptureError, match=name.replace(".", r"\.")):
        use(whole.path)


def unlock(path: Path) -> dict[str, Any]:
    """Take the hashes out of the manifest, as a forger would, and return it."""
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    for rank in manifest["ranks"]:
        rank["files"], rank["shards"] = {}, {}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return manifest


FORGERIES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "blob elsewhere": (
        "blobs.jsonl",
        lambda b: b.replace(b"tensors-00000.safetensors", b"../../../../etc/passwd"),
    ),
    "blob beyond the file": ("blobs.jsonl", lambda b: b.replace(b'"begin":65536', b'"begin":9999999999999')),
    "negative begin": ("blobs.jsonl", lambda b: b.replace(b'"begin":65536', b'"begin":-8')),
    "absurd size": ("blobs.jsonl", lambda b: b.replace(b'"shape":[4,6]', b'"shape":[4611686018427387904,6]')),
    "absurd shape": ("calls.jsonl", lambda b: b.replace(b'"shape":[4,6]', b'"shape":[99999999999,6]')),
    "negative stride": ("calls.jsonl", lambda b: b.replace(b'"stride":[6,1]', b'"stride":[-6,1]')),
    "sparse stride": ("calls.jsonl", lambda b: b.replace(b'"stride":[6,1]', b'"stride":[60000000000000,1]')),
    "stride too short": ("calls.jsonl", lambda b: b.replace(b'"stride":[6,1]', b'"stride":[1]')),
    "other type": ("calls.jsonl", lambda b: b.replace(b'"dtype":"float32"', b'"dtype":"float64"')),
    "unknown type": ("calls.jsonl", lambda b: b.replace(b'"dtype":"float32"', b'"dtype":"__class__"')),
    "not json": ("calls.jsonl", lambda b: b"\x80\x04K\x01." + b),
    "deep json": ("calls.jsonl", lambda b: b'{"attrs":' + b"[" * 100_000 + b"\n" + b),
    "other rank": ("calls.jsonl", lambda b: b.replace(b'"step":1', b'"step":1,"rank":7')),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_record_is_refused_even_with_no_hash_to_betray_it(forgery: str, whole: Capture) -> None:
    unlock(whole.path)
    name, change = FORGERIES[forgery]
    edit(whole.path / "rank_00000" / name, change)
    with pytest.raises(CaptureError):
        use(whole.path)


def test_a_manifest_cannot_name_files_outside(whole: Capture) -> None:
    manifest = unlock(whole.path)
    manifest["ranks"][0]["files"] = {"../../etc/passwd": "0" * 64}
    (whole.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptCaptureError):
        use(whole.path)


def test_a_half_last_line_of_a_torn_capture_is_left_out_and_named(whole: Capture) -> None:
    expected = len(whole.calls) - 1
    manifest = unlock(whole.path)
    manifest |= {"complete": False, "ranks": []}
    (whole.path / "manifest.json").write_text(json.dumps(manifest))
    (whole.path / "rank_00000" / "rank.json").unlink()
    edit(whole.path / "rank_00000" / "calls.jsonl", lambda b: b[:-7])
    torn = load_capture(whole.path)
    assert len(torn.calls) == expected
    assert not torn.complete
    assert any("within a line" in text for text in torn.problems)
    assert any("rank 0 did not finish" in text for text in torn.problems)
    (mm,) = torn.find("mm")
    assert torn.tensor(mm.inputs[0]).shape == (4, 6)


def test_records_written_by_others_carry_their_digest_themselves(whole: Capture) -> None:
    record = TensorRecord(name="0", dtype="float32", shape=(2,), stride=(1,))
    call = Call(index=0, key="k", kind="op", op="x", step=1, inputs=(record,))
    assert msgspec.json.decode(msgspec.json.encode(call), type=Call) == call


def test_many_calls_come_back_in_order_of_execution(whole: Capture) -> None:
    manifest = unlock(whole.path)
    line = (whole.path / "rank_00000" / "calls.jsonl").read_text().splitlines()[-1]
    call = json.loads(line)
    with (whole.path / "rank_00000" / "calls.jsonl").open("w") as file:
        for index in reversed(range(20_000)):
            file.write(json.dumps(call | {"index": index, "key": f"k{index}"}) + "\n")
    manifest["ranks"][0]["calls"] = 20_000
    (whole.path / "manifest.json").write_text(json.dumps(manifest))
    calls = load_capture(whole.path).calls
    assert [c.index for c in calls[:3]] == [0, 1, 2]
    assert len(calls) == 20_000
