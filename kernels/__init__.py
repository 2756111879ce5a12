"""Built-in kernels, one folder each; a built-in is a plugin like anybody's. This file stays inert.

A folder `<name>/` holds `reference.py` (plain torch), `kernel.py` (Triton), `op.py` (the function, with its
visible eager fallback), `spec.py` (SPEC, what `bridge verify --op <name>` judges) and `override.py` (its
torchtitan override).
"""
