"""Softmax over one axis: forward and backward.

Inert; import the part you need: `op` the function, `spec` the KernelSpec, `layer` the module to swap in.
torchtitan has no softmax module to override: its attention fuses it.
"""
