"""What `bridge ab` has to know of a config before it runs it; a child process, since it loads torchtitan.

    python -m bridge.verify.ab_probe CONFIG OUT WANTED_JSON SETTINGS_JSON

writes {"folder": ..., "checkpoints": [...], "clashes": [[present, wanted], ...]} to OUT, or says what the
candidate cannot have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.verify.ab_child import answer

#: Setting that lists torchtitan's overrides.
OVERRIDES = "override.imports"


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Answers about one config."""

    folder: str = ""  #: of the checkpoints; "": the run loads none
    checkpoints: tuple[int, ...] = ()
    clashes: tuple[tuple[Any, str], ...] = ()  #: (override of the config, wanted one that claims the same)


def probe(config_path: Path, wanted: Sequence[str], settings: Mapping[str, Any] | None = None) -> Probe:
    """Look; needs torch and torchtitan.

    Raises BridgeError as `bridge capture` does, and UsageError where the candidate cannot have the wanted
    overrides or settings.
    """
    from bridge.capture.titan import check_overrides, checkpoint_steps, clashing_overrides
    from bridge.config import load_config
    from bridge.verify.registry import prepare_triton

    prepare_triton()
    config = load_config(config_path)
    train = config.train
    check_overrides(train, config.path, wanted, settings or {})
    present = train.set.get(OVERRIDES, [])
    clashes = clashing_overrides(train, config.path, present, wanted) if wanted and present else ()
    found = checkpoint_steps(train, config.path)
    return Probe(
        folder=str(found[0]) if found else "", checkpoints=found[1] if found else (), clashes=clashes
    )


def main(argv: Sequence[str]) -> int:
    """Entry point of the child process."""
    config, out, wanted, settings = argv
    asked = msgspec.json.decode(wanted), msgspec.json.decode(settings)
    return answer(out, lambda: probe(Path(config), *asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
