"""`bridge scan` on the command line: a torchtitan step in which one of torch's kernels is wrong once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torchtitan", reason="the demo run needs torchtitan")

from bridge.cli import run
from bridge.verify import scan_worker
from bridge.verify.diff_document import ScanDocument
from tests.e2e.conftest import DEMO, bridge_command, once

pytestmark = pytest.mark.e2e

#: An override that changes nothing; importing it plants the fault into every second call of silu.
PLANTED = """
import torch
from torchtitan.config import derive, override
from bridge.kernels.offset_rmsnorm.module import OffsetRMSNorm

LIBRARY = torch.library.Library("aten", "IMPL")
CALLS = [0]

def silu(x):
    CALLS[0] += 1
    wrong = torch.sigmoid(x.bfloat16()).float()
    return x * (torch.sigmoid(x) if CALLS[0] % 2 else wrong)

LIBRARY.impl("silu", silu, "CPU")

@override(target=OffsetRMSNorm.Config, exact=True, description="as it is")
def unchanged(config):
    return derive(config, OffsetRMSNorm.Config)
"""


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `capture/`, step 2 of the demo with every tensor, and the first scan of it."""

    def make(folder: Path) -> None:
        (folder / "planted.py").write_text(PLANTED, encoding="utf-8")
        config = (DEMO / "train.toml").read_text(encoding="utf-8")
        kernel = "bridge.kernels.offset_rmsnorm.override.offset_rmsnorm"
        assert kernel in config
        (folder / "train.toml").write_text(config.replace(kernel, "planted.unchanged"), encoding="utf-8")
        made = bridge_command(
            "capture", "--step", "2", "--config", "train.toml", "--ops", "*", "--tensors", "all", "--out",
            "capture", cwd=folder, PYTHONPATH=str(folder),
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        found = bridge_command(
            "scan", "--from", "capture", "-j", "2", "--resume", "results.jsonl", cwd=folder
        )
        (folder / "stdout").write_text(found.stdout, encoding="utf-8")
        (folder / "code").write_text(str(found.returncode), encoding="utf-8")

    return once(tmp_path_factory, "planted", make)


def document(path: Path) -> ScanDocument:
    return msgspec.json.decode(path.read_bytes(), type=ScanDocument)


def test_the_wrong_call_is_first_among_hundreds_of_good_ones(planted: Path) -> None:
    assert (planted / "code").read_text() == "1"
    assert (planted / "stdout").read_text(encoding="utf-8").startswith("FAIL  1 of ")
    found = document(planted / "scan.json")
    assert found.by_verdict.pop("FAIL") == 1 and set(found.by_verdict) == {"PASS"}
    assert found.judged > 200
    (finding,) = found.findings
    assert finding.key == "layers.1.feed_forward/op_0_silu" and finding.row == 0
    table = found.table
    first, *rest = table.margin
    assert first is not None and first > 100
    assert max(margin for margin in rest if margin is not None) <= 1
    # The drill-down has the elements, and the error of a sigmoid of bfloat16.
    detail = next(detail for detail in found.details if detail.row == 0)
    output = detail.tensors[0]
    assert output.role == "output" and output.elementwise and output.error_map is not None
    assert output.max_rel is not None and 2**-11 < output.max_rel < 2**-6
    assert output.worst and output.digest_a is not None and output.digest_b is not None
    assert detail.producers_b == ("layers.1.feed_forward.w1/op_0_mm",)


def test_an_interrupted_scan_judges_only_what_is_left(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (planted / "results.jsonl").read_bytes().splitlines(keepends=True)
    results = tmp_path / "results.jsonl"
    results.write_bytes(b"".join(lines[:-5]) + lines[-5][:40])
    judged = []
    plain = scan_worker.judge_call
    monkeypatch.setattr(
        scan_worker, "judge_call", lambda capture, call: judged.append(call.key) or plain(capture, call)
    )
    report = tmp_path / "report.html"
    options = ["--from", str(planted / "capture"), "-j", "1", "--resume", str(results)]
    assert run(["scan", *options, "--report", str(report)]) == 1
    assert len(judged) == 5
    again, first = document(tmp_path / "scan.json"), document(planted / "scan.json")
    assert (again.table, again.details) == (first.table, first.details)
    assert again.findings[0].evidence == first.findings[0].evidence
    assert len(results.read_bytes().splitlines()) == len(lines) + 1  # the torn line stays, unread
    assert run(["scan", *options, "--report", str(report)]) == 1
    assert len(judged) == 5


def test_a_capture_of_the_good_run_has_no_findings_and_custom_kernels_are_not_called_right(
    demo_run: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    code = run(["scan", "--from", str(demo_run / "capture"), "-j", "1", "--report", str(report)])
    assert code == 3
    found = document(tmp_path / "scan.json")
    assert scan_worker.CUSTOM in found.not_judged and not found.judged
