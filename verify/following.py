"""What to run about a suspect: the command that can judge it. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from bridge.capture.record import Call


def next_command(path: Path, *, kernel: str | None, suspect: Call, maker: Call, stored: bool) -> str:
    """The command that judges a suspect, as a user can paste it.

    Args:
        path: The capture or log that the suspect is in.
        kernel: Known kernel that the suspect is, or that made what it returns.
        suspect: The call that is suspected.
        maker: The call that made what it returns; itself, or one inside a module.
        stored: `path` is a capture, not a log.
    """
    if kernel:
        return f"bridge verify --op {kernel} --from {path}"
    if not stored:
        return "capture this step with `bridge capture` for tensors to judge"
    if maker.kind == "launch":
        # Nobody but its author knows what it should compute, so `bridge scan` leaves launches out.
        return (
            f"bridge verify --kernel FILE --from {path}  "
            f'# FILE: a spec with sites=("{maker.op}",), see docs/kernel-spec.md'
        )
    return f"bridge scan --from {path} --ops '{suspect.key}'"
