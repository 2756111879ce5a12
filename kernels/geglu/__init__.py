"""GeGLU, `gelu(gate) * up`, with the exact gelu or its tanh approximation: forward and backward.

Inert; import the part you need: `op` the function, `spec` the KernelSpecs.
No model of torchtitan has a GeGLU block, so there is no override.
"""
