"""Colours of page and figures, by role, for both themes; the page's CSS is made from these too.

Blue against orange-red stays apart in every common kind of colour blindness, and no meaning hangs on
colour alone: verdicts carry a word and a symbol, points a marker shape.
"""

from __future__ import annotations

from typing import Any

#: role -> (light, dark). Figures are built in the light colours; `themed` swaps them, so within
#: one theme two roles never share a colour.
PALETTE: dict[str, tuple[str, str]] = {
    "ink": ("#1b1f24", "#e4e7eb"),
    "muted": ("#5c6570", "#9aa4b0"),
    "line": ("#d8dde3", "#333a43"),
    "grid": ("#e9ecf0", "#272d35"),
    "paper": ("#ffffff", "#14171b"),
    "panel": ("#f5f7f9", "#1b2026"),
    "pass": ("#0067a3", "#58b2ea"),
    "limited": ("#8a6100", "#e2a521"),
    "unclear": ("#8b4a86", "#cf8fca"),
    "fail": ("#c24100", "#ff8247"),
    "reference": ("#8d96a1", "#78828e"),
    "low": ("#edf1f5", "#20262d"),
    "near": ("#6ea3c9", "#3d7fae"),
    "over": ("#f0a35c", "#c9682b"),
    "far": ("#a33400", "#ff8f52"),
}

#: Outcome of any document -> role.
ROLES: dict[str, str] = {
    "PASS": "pass",
    "PASS WITH LIMITATIONS": "limited",
    "INCONCLUSIVE": "unclear",
    "FAIL": "fail",
    "IDENTICAL": "pass",
    "SAME WITHIN ROUNDING": "pass",
    "NOTHING MATCHED": "unclear",
    "DIVERGED": "fail",
}

_SYMBOLS = {"pass": "\u2713", "limited": "\u2248", "unclear": "?", "fail": "\u2717"}

SYMBOLS: dict[str, str] = {outcome: _SYMBOLS[role] for outcome, role in ROLES.items()}


def light(role: str) -> str:
    """Return the role's colour in the light theme."""
    return PALETTE[role][0]


def dark_of_light() -> dict[str, str]:
    """Return light colour -> dark colour, for the page's script."""
    return dict(PALETTE.values())


def themed(spec: Any, theme: str) -> Any:
    """Return a figure with its colours in `theme` ("light" or "dark")."""
    if theme == "light":
        return spec
    if theme != "dark":
        raise ValueError(f'theme must be "light" or "dark", got {theme!r}')
    swap = dark_of_light()

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return swap.get(node, node) if isinstance(node, str) else node

    return walk(spec)


def css_variables() -> dict[str, str]:
    """Return the variables of both themes as CSS declarations, by theme."""
    return {
        theme: "".join(f"--{role}:{colours[i]};" for role, colours in PALETTE.items())
        for i, theme in enumerate(("light", "dark"))
    }
