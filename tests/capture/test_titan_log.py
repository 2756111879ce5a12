"""Reading the text logs of torchtitan's own tracer."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.capture.titan_log import is_titan_log, read_titan_log, titan_logs
from bridge.errors import CorruptCaptureError, NotACaptureError

LOG = """Total captured activations: 3
Excluded ops dispatched: t, view
================================================================================

[layers.0.attention.wq/op_0_mm]
  Shape: torch.Size([8, 16]), Dtype: torch.bfloat16
  L2 norm: 2.000000e+00
  Min: -1.000000e+00
  Max: 1.500000e+00
  Mean: 2.500000e-01
  Output hash: 6.400000e+01
  Input hashes: 1.000000e+00, 2.000000e+00
  Location: common/attention.py:534

[layers.0.attention.wq/op_1_mul]
  Shape: torch.Size([]), Dtype: torch.float32
  L2 norm: 1.000000e+00
  Min: nan
  Max: nan
  Mean: nan
  Output hash: nan
  Input hashes: 6.400000e+01, 2.000000e+00
  Input producers: layers.0.attention.wq/op_0_mm;
  Phase: backward

[<none>/op_0__fused_adamw_]
  Input hashes: 3.000000e+00

"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank_2_activations.log"
    path.write_text(LOG, encoding="utf-8")
    return path


def test_calls_come_back(log: Path) -> None:
    mm, mul, adam = read_titan_log(log)
    assert mm.key == "layers.0.attention.wq/op_0_mm"
    assert (mm.op, mm.module, mm.phase, mm.rank, mm.source) == (
        "aten::mm", "layers.0.attention.wq", "forward", 2, "common/attention.py:534",
    )  # fmt: skip
    (output,) = mm.outputs
    assert (output.shape, output.dtype) == ((8, 16), "bfloat16")
    assert output.digest is not None
    assert (output.digest.count, output.digest.sum, output.digest.abs_sum) == (128, 32.0, 64.0)
    assert (output.digest.sq_sum, output.digest.min, output.digest.max, output.digest.hash) == (
        4.0,
        -1.0,
        1.5,
        "",
    )
    assert mm.flags["input_l1"] == [1.0, 2.0]
    assert [record.digest.abs_sum for record in mm.inputs if record.digest] == [1.0, 2.0]
    assert mul.phase == "backward"
    assert [record.producer for record in mul.inputs] == [0, None]
    assert mul.outputs[0].shape == ()
    assert (adam.module, adam.op, adam.outputs) == ("", "aten::_fused_adamw_", ())


def test_a_folder_of_logs(log: Path) -> None:
    (log.parent / "rank_0_activations.log").write_text(LOG, encoding="utf-8")
    assert is_titan_log(log)
    assert is_titan_log(log.parent)
    assert not is_titan_log(log.parent / "nothing")
    assert [path.name[:6] for path in titan_logs(log.parent)] == ["rank_0", "rank_2"]


def test_a_log_cut_off_says_so(log: Path) -> None:
    log.write_text(LOG[: LOG.index("[<none>")], encoding="utf-8")
    with pytest.raises(CorruptCaptureError, match=r"announces 3 calls and holds 2.*cut off"):
        read_titan_log(log)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", NotACaptureError, "first line"),
        ("hello\n", NotACaptureError, "first line"),
        (
            "Total captured activations: 1\n[layers.0]\n",
            CorruptCaptureError,
            r":2: expected \[module/op_N_name\]",
        ),
        ("Total captured activations: 1\n[a/op_0_mm]\nShape\n", CorruptCaptureError, ":3: expected"),
    ],
)
def test_damage_is_named(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "rank_0_activations.log"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        read_titan_log(path)
