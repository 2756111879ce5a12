"""Numbers as a reader wants them: three significant digits, short exponents, ASCII."""

from __future__ import annotations

import math

#: What stands where a number was not computed.
NONE = "-"


def short(value: float | None, *, missing: str = NONE) -> str:
    """Return three significant digits: 0.00195 -> "1.95e-3", 12345.6 -> "12300", None -> "-"."""
    if value is None or math.isnan(value):
        return missing
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 999.5:
        return f"{value:#.3g}".removesuffix(".")
    mantissa, exponent = f"{abs(value):.2e}".split("e")
    power = int(exponent)
    sign = "-" if value < 0 else ""
    if not -2 <= power <= 4:
        return f"{sign}{mantissa}e{power}"
    digits = max(0, 2 - power)
    return f"{sign}{round(abs(value), 2 - power):.{digits}f}"


def exact(value: float | None) -> str:
    """Return every digit that matters, for a tooltip or a file."""
    return NONE if value is None else repr(float(value))


def precise(value: float | None, *, missing: str = NONE) -> str:
    """Return seven significant digits: two values that differ in their fourth are to look different."""
    return missing if value is None or math.isnan(value) else f"{value:.7g}"


def percent(share: float | None) -> str:
    """Return a share 0..1 as "0.0313 %"."""
    return NONE if share is None else f"{short(100 * share)} %"


def times(ratio: float | None) -> str:
    """Return a ratio as "27.3x"; None and infinity are "beyond measure"."""
    if ratio == 0:
        return "0"
    return "beyond measure" if ratio is None or math.isinf(ratio) else f"{short(ratio)}x"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return "1 case", "12 cases"."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def ratio(value: float | None, limit: float | None) -> float | None:
    """Return value / limit; None when the value is not finite; inf above a limit of zero."""
    if value is None or limit is None:
        return None
    if limit > 0:
        return value / limit
    return 0.0 if value <= 0 else math.inf
