"""The pytest plugin, run inside pytest runs of its own."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from bridge.capture import Tracer
from bridge.capture.select import Selection

pytest_plugins = ["pytester"]

KERNELS = """
import torch
import triton
import triton.language as tl
from bridge.verify import KernelSpec


@triton.jit
def double_kernel(x_ptr, y_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x * FACTOR, mask=i < n)


def make(factor):
    def target(x):
        x = x.contiguous()
        y = torch.empty_like(x)
        double_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), FACTOR=factor, BLOCK=64)
        return y
    return target


def sample(shape, dtype, generator, device):
    return (torch.randn(shape, generator=generator, device=device).to(dtype),)


def spec(factor):
    return KernelSpec(
        name="double", reference=lambda x: x * 2, target=make(factor), sample=sample, inputs=("x",),
        outputs=("y",), kind="elementwise", shapes=((3, 7),), dtypes=("float32",), sites=("Double",),
    )


GOOD, WRONG = spec(2.0), spec(2.1)
"""

TESTS = """
import pytest
from kernels_under_test import GOOD, WRONG

def test_good(verify_kernel):
    assert verify_kernel(GOOD, sweep={sweep}).verdict == "PASS"

def test_wrong(verify_kernel):
    verify_kernel(WRONG, sweep={sweep})

@pytest.mark.bridge_calls(GOOD)
def test_real(verify_kernel, captured_call):
    assert captured_call.op == "Double"
    verdict = verify_kernel(GOOD, captured_call)
    assert [case.family for case in verdict.cases] == ["captured"]

@pytest.mark.bridge_calls("first")
def test_one(verify_kernel, captured_call):
    verify_kernel(GOOD, captured_call)
"""


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "capture"
    model = torch.nn.Sequential()
    model.add_module("first", Double())
    model.add_module("second", Double())
    tracer = Tracer(model, out=out, step=7, selection=Selection(patterns=("Double",)))
    with tracer:
        model(torch.randn(5, 8))
    tracer.finish()
    return out


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(kernels_under_test=KERNELS, test_kernels=TESTS.format(sweep=True))
    pytester.makeini("[pytest]")
    pytester.syspathinsert()
    return pytester


def properties(path: Path) -> dict[str, dict[str, str]]:
    """JUnit <property> values by test name."""
    return {
        case.attrib["name"]: {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
        for case in ElementTree.parse(path).iter("testcase")
    }


def test_without_a_capture(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("-p", "no:cacheprovider", "--junitxml=junit.xml", "-rs")
    result.assert_outcomes(passed=1, failed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "*Kernel double: FAIL*",
            "*Greatest absolute difference: *",
            "*numerics-bridge*",
            "*double: FAIL*test_wrong*error *threshold*",
            "*needs captured calls: run with --bridge-from=DIR*",
        ]
    )
    found = properties(project.path / "junit.xml")
    assert found["test_good"]["bridge_verdict"] == "double: PASS"
    wrong = found["test_wrong"]
    assert float(wrong["bridge_target_error"]) > float(wrong["bridge_threshold"])
    assert {"bridge_reference_error", "bridge_tensor"} <= set(wrong)


def test_captured_calls_become_tests_and_workers_of_xdist_write_and_tell_everything(
    project: pytest.Pytester, captured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where there is no GPU the plugin sees to that before a test module imports triton.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    project.makepyfile(test_kernels=TESTS.format(sweep=False))
    result = project.runpytest_subprocess(
        "-p", "no:cacheprovider", "-n2", "-v", f"--bridge-from={captured}", "--bridge-report=reports"
    )
    result.assert_outcomes(passed=4, failed=1)
    for name in ("test_real[first-step7]", "test_real[second-step7]", "test_one[first-step7]"):
        assert any("PASSED" in line and line.rstrip().endswith(f"::{name}") for line in result.outlines)
    assert sum("double: PASS [" in line for line in result.outlines) == 4
    written = sorted(path.name for path in (project.path / "reports").iterdir())
    assert len(written) == 10 and "test_kernels.py_test_real_first-step7.html" in written


def test_what_cannot_be_served_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(captured_call): pass")
    result = pytester.runpytest_subprocess("--bridge-from=absent")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "absent does not exist" in "\n".join(result.outlines + result.errlines)
    (pytester.path / "report.html").write_text("x")
    result = pytester.runpytest_subprocess("--bridge-report=report.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--bridge-report needs a folder" in "\n".join(result.outlines + result.errlines)


def test_the_plugin_loads_no_torch() -> None:
    code = (
        "import sys, bridge.pytest_plugin, bridge.testing; "
        "print([name for name in ('torch', 'plotly', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
