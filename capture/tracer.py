"""The context manager that is put around one training step, and takes it down."""

from __future__ import annotations

import datetime
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from bridge._version import __version__
from bridge.capture.folder import FolderClaim, rank_folder, reserve_manifest, write_manifest
from bridge.capture.record import Manifest
from bridge.capture.select import Matcher, Selection
from bridge.environment import device_name, package_versions
from bridge.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from bridge.capture.stepper import StepSession
    from bridge.capture.writer import RankReport

log = logging.getLogger("bridge.capture")

#: Seconds that rank 0 waits for the other ranks' files.
_PATIENCE = 120.0


class Tracer:
    """Capture everything that happens between `with Tracer(...)` and its end, where it is complete on disk.

    Make it before the step: the first one in a process imports and compiles for a few seconds. Outside the
    `with` nothing is installed. An error inside the tool is logged and noted in the capture; it never
    reaches the step.

        tracer = Tracer(model, out="capture/", step=100, selection=Selection(patterns=("RMSNorm",)))
        with tracer:
            loss = train_step()
        tracer.finish(metrics={"loss": loss.item()})
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None = None,
        *,
        out: Path | str,
        step: int,
        rank: int | None = None,
        world_size: int | None = None,
        selection: Selection | None = None,
        budget_bytes: int | None = None,
        force: bool = False,
        eager: bool = False,
        seed: int | None = None,
        config: Mapping[str, Any] | None = None,
        config_path: str | None = None,
        command: Sequence[str] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        """Claim the folder and warm up; the step may come much later.

        Args:
            model: The model, or the parts of a pipeline; without it calls have no module names.
            out: Folder to write; must be new, empty, or with `force` a capture.
            step: Global number of the step.
            rank, world_size: Default: those of torch.distributed, or 0 and 1.
            selection: Whose tensors to store; default: digests only.
            budget_bytes: Most bytes of tensors to store on this rank.
            force: Replace the capture that stands there.
            eager: Run compiled functions uncompiled in this step, so that every operator is seen. The step's
                numbers are then those of the uncompiled model.
            seed, config, config_path, command, metrics, flags: For the manifest.

        Raises:
            UsageError: a selection that makes no sense.
            NotACaptureError, CaptureError: the folder cannot be used.
        """
        selection = selection or Selection()
        selection.check()
        if budget_bytes is not None and budget_bytes < 0:
            raise UsageError(f"the budget must not be negative; got {budget_bytes} bytes")
        from bridge.capture.stepper import distributed_place, warm_up

        found_rank, found_world = distributed_place()
        self.out = Path(out)
        self.step = step
        self.rank = found_rank if rank is None else rank
        self.world_size = found_world if world_size is None else world_size
        self._parts = _parts(model)
        self._selection = selection
        self._budget = budget_bytes
        self._eager = eager
        self._claim = FolderClaim(self.out, force=force, owner=self.rank == 0)
        self._session: StepSession | None = None
        self._report: RankReport | None = None
        self._metrics = dict(metrics or {})
        self._manifest = Manifest(
            tool=f"numerics-bridge {__version__}",
            step=step,
            steps=(step,),
            command=tuple(sys.argv if command is None else command),
            seed=seed,
            config=dict(config or {}),
            config_path=config_path,
            world_size=self.world_size,
            selection=_plain_selection(selection),
            budget_bytes=budget_bytes,
            flags={**(flags or {}), **({"eager": True} if eager else {})},
            # Read here, since looking up a dozen packages takes longer than many a step.
            versions=package_versions(),
            device=device_name(),
        )
        warm_up(self._parts)
        if selection.patterns and selection.which != "none":
            from bridge.capture import lanes

            lanes.warm_up()

    def __enter__(self) -> Tracer:
        from bridge.capture.stepper import StepSession, rank_zero_first, run_flags
        from bridge.capture.writer import RankWriter

        if self._session is not None:
            raise UsageError(
                f"this Tracer has captured step {self.step} already; make a new one for another step"
            )
        self._manifest = replace(
            self._manifest,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            flags={**run_flags(), **self._manifest.flags},
        )
        try:
            with rank_zero_first(self.rank, self.world_size):
                if self.rank == 0:
                    self._claim.start()
                    write_manifest(self.out, self._manifest)
                    reserve_manifest(self.out)
            writer = RankWriter(rank_folder(self.out, self.rank), rank=self.rank, budget_bytes=self._budget)
        except OSError as error:
            # Named here: a training script's own errors come the same way.
            raise CaptureError(
                f"cannot write the capture {self.out}: {error.strerror}; free some space, or write elsewhere "
                "with --out"
            ) from None
        self._session = StepSession(
            writer,
            Matcher(self._selection, rank=self.rank),
            parts=self._parts,
            step=self.step,
            rank=self.rank,
            max_tensor_bytes=self._selection.max_tensor_bytes,
            eager=self._eager,
        )
        self._session.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        assert self._session is not None, "a Tracer ended that never began"
        self._session.stop(error)
        # Now, not in `finish`: after an error, or in a loop of one's own, nobody may call that.
        self.finish()

    def finish(self, *, metrics: Mapping[str, float | None] | None = None) -> Path:
        """Add to the manifest what is known only after the step; the end of the `with` wrote all else.

        Called without a `with` before it, it gives the folder back.

        Args:
            metrics: "loss", "grad_norm" and whatever else the step yielded.

        Returns:
            The capture's folder.
        """
        if self._session is None:
            self._claim.release()
            return self.out
        if self._report is None:
            self._report = self._close(self._session)
            reports = [self._report, *self._other_ranks()]
            problems = [text for report in reports for text in report.problems]
            self._manifest = replace(
                self._manifest,
                complete=not self._session.interrupted and len(reports) == self.world_size,
                metrics={**self._metrics, **(metrics or {})},
                ranks=tuple(report.files for report in reports),
                stored_bytes=sum(report.stored_bytes for report in reports),
                forecast_bytes=sum(report.forecast_bytes or 0 for report in reports) or None,
                dropped=tuple(drop for report in reports for drop in report.dropped),
                problems=tuple(dict.fromkeys(problems)),
                problem_codes={
                    text: code for report in reports for text, code in report.problem_codes.items()
                },
            )
            self._write_manifest()
            self._claim.release()
        elif metrics:
            self._manifest = replace(self._manifest, metrics={**self._manifest.metrics, **metrics})
            self._write_manifest()
        return self.out

    def _write_manifest(self) -> None:
        if self.rank != 0:
            return
        try:
            write_manifest(self.out, self._manifest)
        except OSError as failure:
            log.warning("capture: the manifest could not be completed: %s; the capture is partial", failure)

    def _close(self, session: StepSession) -> RankReport:
        """Write this rank's files out."""
        return session.close()

    @property
    def calls(self) -> int:
        """Calls seen so far."""
        return self._session.recorder.seen if self._session else 0

    def _other_ranks(self) -> list[RankReport]:
        if self.rank != 0 or self.world_size == 1:
            return []
        import msgspec

        from bridge.capture.writer import RankReport

        reports, deadline = [], time.monotonic() + _PATIENCE
        for rank in range(1, self.world_size):
            path = rank_folder(self.out, rank) / "rank.json"
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            if path.exists():
                reports.append(msgspec.json.decode(path.read_bytes(), type=RankReport))
            else:
                log.warning(
                    "capture: rank %d did not finish within %.0f s; the capture is partial", rank, _PATIENCE
                )
        return reports


def _parts(model: Any) -> list[nn.Module]:
    if model is None:
        return []
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _plain_selection(selection: Selection) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(selection)
    return plain
