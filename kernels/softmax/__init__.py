"""Softmax over one axis: forward and backward.

Inert; import the part you need: `op` the function, `spec` the KernelSpec.
torchtitan has no softmax module to override: its attention fuses it. In other runs
`[capture] replace` swaps it in.
"""
