"""Names, sizes and on-disk codes of element types. Imports no torch."""

from __future__ import annotations

#: torch's name -> (bytes of one element, safetensors' name or None where the format has none).
DTYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2fnuz": (1, None),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex32": (4, None),
    "complex64": (8, "C64"),
    "complex128": (16, None),
}

_SIZES = {name: size for name, (size, _) in DTYPES.items()}

#: Complex types are digested as pairs of these.
REAL_OF = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def itemsize(dtype: str) -> int | None:
    """Bytes of one element; None for a type that is neither digested nor stored (int4, quantized, bits)."""
    return _SIZES.get(dtype)


def safetensors_name(dtype: str) -> str | None:
    """The format's own name of a type; None: the blob is stored as bytes, "U8"."""
    known = DTYPES.get(dtype)
    return known[1] if known else None
