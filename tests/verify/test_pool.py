"""Several processes judge one kernel: the verdict of one, whatever dies, hangs or refuses on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bridge.errors import KernelError
from bridge.verify import Verdict, isolate, nursery
from bridge.verify.api import verify_kernel
from bridge.verify.child import Child, spawn
from bridge.verify.isolate import MAX_JOBS, default_jobs
from bridge.verify.pool import share_out
from bridge.verify.power import power_of
from bridge.verify.request import Event, Phase, Request, Started
from bridge.verify.tasks import Drawn, Kept, Tried, has_room

torch.set_num_threads(1)

KERNEL = """
import os, threading, time
import torch
from bridge.verify import KernelSpec


@torch.library.custom_op("pool_test::scale", mutates_args=())
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # FAULT
    return x * weight


@scale.register_fake
def _(x, weight):
    return torch.empty_like(x)


def reference(x, weight):
    return x * weight


def sample(shape, dtype, generator, device):
    x = torch.randn(shape, generator=generator, device=device).to(dtype)
    return x, torch.randn(shape[-1], generator=generator, device=device).to(dtype)


SPEC = KernelSpec(
    name="scale", reference=reference, target=scale, sample=sample, inputs=("x", "weight"),
    outputs=("y",), kind="elementwise", shapes=((4, 16), (3, 7)), dtypes=("float32", "float16"),
)
"""


def written(folder: Path, fault: str = "", module: str = "") -> Path:
    path = folder / "scale.py"
    path.write_text(KERNEL.replace("# FAULT", fault or "pass") + module)
    return path


def plain(verdict: Verdict) -> Any:
    """A verdict as data, without what two runs may differ in."""
    document = json.loads(msgspec.json.encode(verdict, enc_hook=str))
    for case in document["cases"]:
        del case["seconds"]
    # Whether triton is loaded, and so interpreted, is up to the tests that ran before in this process.
    del document["provenance"]["created"], document["provenance"]["interpreter"]
    return document


@pytest.mark.parametrize("fault", ["", "return x * weight * (1 + 1e-2 * (x.shape[-1] % 2))"])
def test_the_verdict_is_that_of_one_process(tmp_path: Path, fault: str) -> None:
    path = written(tmp_path, fault)
    events: list[Event] = []
    alone = verify_kernel(path)
    together = verify_kernel(path, isolate=True, jobs=3, progress=events.append)
    assert plain(together) == plain(alone)
    assert alone.verdict == ("FAIL" if fault else "PASS") and len(alone.cases) > 60
    assert bool(fault) == (alone.diagnosis is not None) and bool(fault) != bool(alone.power.revealed)
    started = [event for event in events if isinstance(event, Started)]
    assert [event.number for event in started] == list(range(1, len(alone.cases) + 1))
    assert {event.case for event in started} == {case.name for case in alone.cases}
    phases = [event.name for event in events if isinstance(event, Phase)]
    assert phases == ["loading", "planning", "weighing the evidence"]


def test_what_crashes_or_hangs_costs_its_case_alone(tmp_path: Path) -> None:
    constant = "x.shape == (3, 7) and (x == x[:, :1]).all() and x.any()"
    fault = f"os.abort() if x.isnan().any() else time.sleep(1000 if {constant} else 0)"
    # The module's own thread would not survive a fork; it is loaded afterwards.
    thread = "\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    path = written(tmp_path, fault, module=thread)
    verdict = verify_kernel(path, isolate=True, jobs=2, timeout=20, dtypes=["float32"])
    lost = {case.name: case.notes[-1] for case in verdict.cases if case.verdict == "FAIL"}
    assert list(lost) == ["(3, 7) float32, constant rows", "(3, 7) float32, NaN in one row"]
    assert "hangs (--timeout)" in lost["(3, 7) float32, constant rows"]
    assert "SIGABRT" in lost["(3, 7) float32, NaN in one row"]
    assert len(verdict.cases) > 30 and not verdict.coverage.not_covered


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_hangs_everywhere_is_given_up_after_two_cases(tmp_path: Path, jobs: int) -> None:
    log = tmp_path / "log"
    fault = f"open({str(log)!r}, 'a').write(f'{{tuple(x.shape)}}\\n'), time.sleep(1000)"
    verdict = verify_kernel(written(tmp_path, fault), isolate=True, jobs=jobs, timeout=15)
    assert verdict.verdict == "FAIL" and len(verdict.cases) == 2
    assert all("hangs (--timeout)" in case.notes[-1] for case in verdict.cases)
    assert "not judged: the kernel hung in (4, 16) float32 and in (3, 7) float32" in str(verdict.coverage)
    assert sorted(log.read_text().splitlines()) == ["(3, 7)", "(4, 16)"]  # Each once.


def test_after_four_crashes_in_the_order_of_the_cases_the_rest_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "os.abort() if x.abs().max() > 50 else None")
    verdict = verify_kernel(path, isolate=True, jobs=3, dtypes=["float32"])
    lost = [case.name.rpartition(", ")[2] for case in verdict.cases if case.verdict == "FAIL"]
    assert lost == ["x * 100", "x + 1000", "x - 1000", "all very negative"]
    names = [case.name.rpartition(", ")[2] for case in verdict.cases]
    assert "all negative" in names and "all positive" not in names
    assert any("not judged: the kernel had crashed on 4" in text for text in verdict.coverage.not_covered)


def test_the_first_refusal_in_the_order_of_the_cases_is_told(tmp_path: Path) -> None:
    path = written(tmp_path)
    # Two dtypes of one shape fall into groups that are judged in any order; drawing runs without autograd.
    line = "    return x * weight\n\n\ndef sample"
    refuses = (
        "    assert not torch.is_grad_enabled() or x.dtype != torch.float16 and x.shape != (3, 7), x.shape\n"
    )
    path.write_text(path.read_text().replace(line, refuses + line))
    with pytest.raises(KernelError) as alone:
        verify_kernel(path, quick=True)
    with pytest.raises(KernelError) as together:
        verify_kernel(path, quick=True, isolate=True, jobs=2)
    assert str(together.value) == str(alone.value) and "'(3, 7) float32'" in str(alone.value)


def test_what_raises_fails_its_case_alone_unless_it_raises_everywhere(tmp_path: Path) -> None:
    path = written(tmp_path, "assert x.dtype != torch.float16 and x.shape != (3, 7), x.shape")
    alone = verify_kernel(path, quick=True)
    together = verify_kernel(path, quick=True, isolate=True, jobs=2)
    assert plain(together) == plain(alone)
    assert [case.verdict for case in alone.cases[:2]] == ["PASS", "FAIL"]
    assert alone.verdict == "FAIL" and "raised AssertionError" in str(alone.tensors[1].structure)
    path = written(tmp_path, "import absent")
    with pytest.raises(KernelError) as one:
        verify_kernel(path, quick=True)
    with pytest.raises(KernelError) as several:
        verify_kernel(path, quick=True, isolate=True, jobs=2)
    assert str(several.value) == str(one.value) and "No module named 'absent'" in str(one.value)


def test_where_nothing_can_be_forked_workers_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery, "FORKS", False)
    together = verify_kernel(written(tmp_path), isolate=True, jobs=2, quick=True)
    assert together.verdict == "PASS" and len(together.cases) == 4


@pytest.mark.gpu
def test_forked_workers_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    def counted(*arguments: Any, **options: Any) -> Child:
        started.append(spawn(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(nursery, "spawn", counted)
    together = verify_kernel("offset_rmsnorm", isolate=True, jobs=4, dtypes=["bfloat16"])
    assert len(started) == 1
    assert plain(together) == plain(
        verify_kernel("offset_rmsnorm", isolate=True, jobs=1, dtypes=["bfloat16"])
    )
    assert together.verdict == "PASS" and together.provenance.device.startswith("NVIDIA")


def test_inputs_that_differ_between_processes_are_judged_by_one(tmp_path: Path) -> None:
    path = written(tmp_path)
    drawn = "torch.randn(shape, generator=generator, device=device)"
    path.write_text(path.read_text().replace(drawn, f"(os.getpid() * {drawn})", 1))
    verdict = verify_kernel(path, isolate=True, jobs=3, quick=True)
    assert verdict.verdict == "PASS" and len(verdict.cases) == 4


def _descendants(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | _descendants(child)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_workers_do_not_outlive_a_killed_command(tmp_path: Path) -> None:
    path = written(tmp_path, "time.sleep(1000)")
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "bridge", "verify", "--kernel", str(path), "--jobs", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, env=environment)
    while not (tmp_path / "verdict.declared.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    workers = _descendants(process.pid)
    assert len(workers) == 3  # Two, and the process that they were forked from.
    process.send_signal(signal.SIGKILL)
    process.wait()
    for worker in workers:
        while _runs(worker):
            time.sleep(0.05)
    assert not list((tmp_path / "tmp").glob("bridge-*"))
    declared = json.loads((tmp_path / "verdict.declared.json").read_text())
    assert declared["cases"][:2] == ["(4, 16) float32", "(3, 7) float32"]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_jobs_follow_the_work_and_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(isolate, "_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert default_jobs(Request(op="x")) == MAX_JOBS == default_jobs(Request(op="x", quick=True))
    assert default_jobs(Request(op="x", sweep=False)) == default_jobs(Request(op="x", target="recorded")) == 1
    quota.write_text("max 100000\n")
    assert default_jobs(Request(op="x")) == MAX_JOBS
    quota.write_text("250000 100000\n")
    assert default_jobs(Request(op="x")) == 2 and default_jobs(Request(op="x", quick=True)) == 1


def test_the_dearest_groups_are_taken_first_and_none_is_too_dear() -> None:
    def drawn(group: str, cost: float, count: int) -> list[Drawn]:
        return [Drawn(name=f"{group} {n}", group=group, cost=cost) for n in range(count)]

    cases = [*drawn("captured", 1, 3), *drawn("a", 1, 12), *drawn("b", 4.5, 1), *drawn("a", 1, 3)]
    assert share_out(cases, 1) == [[16], [*range(4, 16), 17, 18, 19], [1, 2, 3]]
    first, second, third = [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]
    assert share_out(cases, 4) == [[17, 18, 19], first, second, third, [16], [1, 2, 3]]
    assert share_out(drawn("captured", 1, 2), 4) == [[1, 2]]
    assert share_out([], 4) == []


def test_evidence_is_kept_for_the_first_of_its_kind() -> None:
    def kept(family: str, *, failed: bool) -> Kept:
        return Kept(number=1, dtype="float32", family=family, failed=failed)

    passed, other = kept("declared", failed=False), kept("layout", failed=False)
    failed, elsewhere = kept("declared", failed=True), kept("layout", failed=True)
    assert has_room(passed, [passed, *[failed] * 9])
    assert not has_room(passed, [passed, other])
    assert has_room(failed, [*[failed] * 3, *[elsewhere] * 9])
    assert not has_room(failed, [failed] * 4)


def test_power_is_told_in_the_order_of_the_variants() -> None:
    tried = [Tried(place=n, text=f"variant {n}", seen=n != 2) for n in (3, 1, 2, 0)]
    power = power_of(tried)
    assert power.revealed == ("variant 0", "variant 1", "variant 3") and power.not_revealed == ("variant 2",)
