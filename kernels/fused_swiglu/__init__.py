"""SwiGLU, `silu(gate) * up`: forward and backward, and the feed-forward block with one gate-and-up weight.

Inert; import the part you need: `op` the function, `spec` the KernelSpec, `override` the torchtitan factory.
"""
