"""The command after a suspect is one that can judge it."""

from __future__ import annotations

from pathlib import Path

from bridge.capture.record import Call
from bridge.verify.following import next_command
from bridge.verify.scan import _reason

RUN = Path("ab/candidate")


def call(kind: str, op: str) -> Call:
    return Call(index=0, key=f"norm/{kind}_0_{op}", kind=kind, op=op, step=1, phase="forward", module="norm")


def test_a_launch_of_an_unknown_kernel_needs_a_spec_since_scan_leaves_launches_out() -> None:
    launch = call("launch", "my_bad_norm_fwd")
    assert "bridge verify" in str(_reason(launch, 1 << 30))
    for suspect in (launch, call("module", "Norm")):
        said = next_command(RUN, kernel=None, suspect=suspect, maker=launch, stored=True)
        assert said.startswith("bridge verify --kernel FILE --from ab/candidate ")
        assert 'sites=("my_bad_norm_fwd",)' in said and "docs/kernel-spec.md" in said


def test_an_op_is_scanned_and_a_known_kernel_verified() -> None:
    op = call("op", "mm")
    assert next_command(RUN, kernel=None, suspect=op, maker=op, stored=True) == (
        "bridge scan --from ab/candidate --ops 'norm/op_0_mm'"
    )
    launch = call("launch", "rms_norm_kernel")
    said = next_command(RUN, kernel="rms_norm", suspect=launch, maker=launch, stored=True)
    assert said == "bridge verify --op rms_norm --from ab/candidate"
    assert "bridge capture" in next_command(RUN, kernel=None, suspect=op, maker=op, stored=False)
