"""Which calls of a run belong to a known kernel: `--ops` names turned into patterns. Loads torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from bridge.errors import BridgeError, near_misses


def known_sites(ops: Sequence[str], say: Callable[[str], None]) -> dict[str, tuple[str, ...]]:
    """Kernel name -> module classes, dispatcher ops and Triton kernels where it occurs.

    Of the kernels that `ops` names, or of all when it names nothing: loading one imports Triton. A kernel
    that does not load is reported through `say` and left out: it must not stop a run.
    """
    from bridge.verify.registry import known_names, load_spec

    found: dict[str, tuple[str, ...]] = {}
    for name in known_names():
        if ops and name not in ops:
            continue
        try:
            spec = load_spec(name).spec
        except BridgeError as error:
            say(f"kernel {name} is left out of the selection: {error}")
            continue
        found[spec.name] = spec.sites or (spec.name,)
    return found


#: torch's own optimizer steps: the whole model and its state, four times its size.
_ON_REQUEST = ("aten::_fused_adam", "aten::_foreach_")


def expand(ops: Sequence[str], sites: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Replace kernel names by their sites; every other entry is a glob and stays.

    No ops: every kernel, but for steps of torch's own optimizers, which are kept when asked for.
    """
    wanted: Iterable[str] = ops or sites
    patterns = [pattern for op in wanted for pattern in sites.get(op, (op,))]
    return tuple(dict.fromkeys(p for p in patterns if ops or not p.startswith(_ON_REQUEST)))


def looks_unknown(op: str, names: Iterable[str]) -> str | None:
    """A warning for an entry that fits no kernel, module or class known before the first step.

    Dispatcher ops and keys are known only when they run, so an entry that could be one is never warned of.
    """
    if re.search(r"[*?\[/]|::", op) or op in (known := set(names)):
        return None
    return f"no kernel, module or module class is called {op!r}; {near_misses(op, known)}"
