"""Built-in kernels, one folder each; a built-in is a plugin like anybody's. This file stays inert.

A folder `<name>/` holds `reference.py` (plain torch), `kernel.py` (Triton), `op.py` (the function, with its
visible eager fallback), `spec.py` (SPEC, what `bridge verify --op <name>` judges) and, where torchtitan has
such a module, `override.py` (what puts the kernel in its place). A gradient is for reverse mode, once.
"""
