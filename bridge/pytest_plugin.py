"""pytest for authors of kernels: fixtures `verify_kernel` and `captured_call`, and two options.

    def test_my_kernel(verify_kernel):
        verify_kernel(SPEC)

    @pytest.mark.bridge_calls(SPEC)          # or a glob over key, op, module and module class
    def test_on_real_inputs(verify_kernel, captured_call):
        verify_kernel(SPEC, captured_call)

    pytest --bridge-from=capture/ --bridge-report=reports/

Write the `=`: pytest takes a path that stands by itself for a test, and looks for its ini file from there.

Every pytest run in the environment imports this module, so it loads neither torch nor plotly.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bridge.capture.record import Call
    from bridge.capture.store import Capture
    from bridge.verify.verdict import TensorVerdict, Verdict

_CAPTURE: pytest.StashKey[Any] = pytest.StashKey()
#: Names under which a test's numbers reach JUnit's <property> and the terminal summary.
_PREFIX = "bridge_"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("numerics-bridge", "judging kernels")
    group.addoption(
        "--bridge-from",
        metavar="DIR",
        type=Path,
        help="capture folder: `captured_call` is each of its calls in turn, `verify_kernel` judges them",
    )
    group.addoption(
        "--bridge-report",
        metavar="DIR",
        type=Path,
        help="folder for one HTML report and one verdict JSON per judged test",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "bridge_calls(spec_or_glob): which calls of --bridge-from `captured_call` stands for",
    )
    report = config.getoption("bridge_report")
    if report is not None and report.is_file():
        raise pytest.UsageError(
            f"--bridge-report needs a folder (one report per test), got the file {report}"
        )
    if report is not None or config.getoption("bridge_from") is not None:
        _prepare_triton()


def _prepare_triton() -> None:
    """Let kernels run without a GPU, before a test module imports triton."""
    from bridge.errors import UsageError
    from bridge.verify.registry import prepare_triton

    # Where another plugin has imported triton already, the kernel itself says what is wrong.
    with contextlib.suppress(UsageError):
        prepare_triton()


def _capture(config: pytest.Config) -> Capture | None:
    folder: Path | None = config.getoption("bridge_from")
    if folder is None:
        return None
    if _CAPTURE not in config.stash:
        from bridge.capture.store import load_capture
        from bridge.errors import BridgeError

        try:
            config.stash[_CAPTURE] = load_capture(folder)
        except BridgeError as error:
            raise pytest.UsageError(f"--bridge-from: {error}") from None
    found: Capture = config.stash[_CAPTURE]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per captured call, with an id such as `layers.0.attention_norm-step100`."""
    if "captured_call" not in metafunc.fixturenames:
        return
    capture = _capture(metafunc.config)
    if capture is None:
        skip = pytest.mark.skip(reason="needs captured calls: run with --bridge-from=DIR")
        metafunc.parametrize("captured_call", [pytest.param(None, marks=skip, id="no-capture")])
        return
    calls = _wanted(capture, metafunc.definition.get_closest_marker("bridge_calls"))
    if not calls:
        skip = pytest.mark.skip(reason=f"{capture.path} holds no such call with stored tensors")
        metafunc.parametrize("captured_call", [pytest.param(None, marks=skip, id="no-call")])
        return
    metafunc.parametrize("captured_call", calls, ids=[call_id(call) for call in calls])


def _wanted(capture: Capture, marker: pytest.Mark | None) -> list[Call]:
    from bridge.errors import UsageError
    from bridge.verify import sites
    from bridge.verify.spec import KernelSpec

    what = marker.args[0] if marker is not None and marker.args else None
    if isinstance(what, KernelSpec):
        try:
            found = list(sites.find_calls(capture, what))
        except UsageError:
            return []
    elif isinstance(what, str):
        found = [call for call in capture.find(what) if call.phase == "forward"]
    elif what is None:
        found = [call for call in capture.calls if call.kind == "module" and call.phase == "forward"]
    else:
        raise pytest.UsageError(f"bridge_calls takes a KernelSpec or a glob, got {type(what).__name__}")
    ranked = sites.rank(found).calls
    return sorted(ranked, key=lambda call: (call.step, call.rank, call.index))


def call_id(call: Call) -> str:
    """Readable, unique within a capture, and free of what a shell or a file name would trip over."""
    rank = f"-rank{call.rank}" if call.rank else ""
    return re.sub(r"[^\w.\-]+", "_", f"{call.key}-step{call.step}{rank}")


class KernelVerifier:
    """What the fixture `verify_kernel` gives: callable, and `.verdicts` of this test."""

    def __init__(
        self, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
    ) -> None:
        self._request = request
        self._record = record_property
        self.verdicts: list[Verdict] = []

    def __call__(self, spec: Any, captured_call: Call | None = None, **options: Any) -> Verdict:
        """Judge `spec`; raises AssertionError when it may not be trusted.

        Args:
            spec: a KernelSpec, the name of a known one, or FILE[:SPEC].
            captured_call: judge this call alone; without it, all calls of --bridge-from and the drawn inputs.
            options: as `bridge.testing.verify_kernel` takes them.
        """
        from bridge import testing

        __tracebackhide__ = True
        if captured_call is not None:
            options = {"sweep": False, "call": captured_call, **options}
        options.setdefault("capture", _capture(self._request.config))
        try:
            verdict = testing.verify_kernel(spec, **options)
        except testing.KernelAssertionError as error:
            self._keep(error.verdict)
            raise
        self._keep(verdict)
        return verdict

    def _keep(self, verdict: Verdict) -> None:
        number = f"{len(self.verdicts)}_" if self.verdicts else ""
        self.verdicts.append(verdict)
        self._record(f"{_PREFIX}{number}verdict", f"{verdict.op}: {verdict.verdict}")
        worst = _worst(verdict)
        if worst is not None:
            self._record(f"{_PREFIX}{number}tensor", f"{worst.tensor} of {worst.case}")
            for name in ("reference_error", "target_error", "threshold"):
                self._record(f"{_PREFIX}{number}{name}", getattr(worst, name))
        folder: Path | None = self._request.config.getoption("bridge_report")
        if folder is not None:
            from bridge.report import write_json, write_report

            # A name per test: xdist workers never write the same file.
            stem = re.sub(r"[^\w.\-]+", "_", self._request.node.nodeid)[-150:].strip("_")
            stem += f"-{len(self.verdicts)}" if len(self.verdicts) > 1 else ""
            write_report(verdict, folder / f"{stem}.html")
            write_json(verdict, folder / f"{stem}.json")


def _worst(verdict: Verdict) -> TensorVerdict | None:
    """The tensor that came closest to, or went furthest beyond, its threshold."""

    def margin(entry: TensorVerdict) -> tuple[bool, float]:
        if entry.target_error is None or not entry.threshold:
            return entry.verdict == "FAIL", 0.0
        return entry.verdict == "FAIL", entry.target_error / entry.threshold

    return max(verdict.tensors, key=margin, default=None)


@pytest.fixture
def verify_kernel(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> KernelVerifier:
    """Judge a kernel inside a test; see `bridge.testing.verify_kernel`."""
    return KernelVerifier(request, record_property)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per judged kernel; user properties travel from xdist workers, so this sees them all."""
    lines = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            found = dict(getattr(report, "user_properties", ()))
            if f"{_PREFIX}verdict" in found:
                lines.append((report.nodeid, found))
    if not lines:
        return
    terminalreporter.section("numerics-bridge")
    for nodeid, found in lines:
        numbers = ""
        error, threshold = found.get(f"{_PREFIX}target_error"), found.get(f"{_PREFIX}threshold")
        if error is not None and threshold is not None:
            numbers = f"; {found[f'{_PREFIX}tensor']}: error {error:.3g}, threshold {threshold:.3g}"
        terminalreporter.write_line(f"{found[f'{_PREFIX}verdict']} [{nodeid}]{numbers}")
