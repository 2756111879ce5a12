"""How much to check and from which seed; everything that decides a verdict's inputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices of one verification.

    seed: of every generator used.
    repeats: runs of the same inputs; each must pass.
    sweeps: add tile edges, smallest shapes, adversarial values and layouts to the declared shapes.
    power: put wrong variants in the target's place.
    recorded: judge the outputs that the run recorded; the target is not run.
    budget_elements: added cases larger than this many input elements are left out.
    max_edges: edge shapes per dtype.
    large_bytes: cases whose largest input has at least as many bytes are judged in blocks of rows. Smaller
        ones take no more memory as a whole than torch does by being loaded.
    """

    seed: int = 0
    repeats: int = 3
    sweeps: bool = True
    power: bool = True
    recorded: bool = False
    budget_elements: int = 1 << 18
    max_edges: int = 24
    large_bytes: int = 4 << 20
