"""RMSNorm, `weight * x / sqrt(mean(x^2) + eps)`: forward and backward.

Inert; import the part you need: `op` the function, `spec` the KernelSpec, `override` the torchtitan factory.
"""
