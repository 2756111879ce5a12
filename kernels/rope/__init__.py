"""Rotary position embedding from cos/sin tables: half-split or interleaved, whole or partial.

Inert; import the part you need: `op` the function, `table` the tables, `spec` the KernelSpecs, `override`.
"""
