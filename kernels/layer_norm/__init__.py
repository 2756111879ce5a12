"""LayerNorm, `(x - mean) / sqrt(var + eps) * weight + bias`: forward and backward.

Inert; import the part you need: `op` the function, `spec` the KernelSpec, `override` the torchtitan factory.
"""
