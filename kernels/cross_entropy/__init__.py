"""Cross-entropy over a vocabulary, in chunks, with ignored labels and label smoothing: forward and backward.

Inert; import the part you need: `op` the function, `spec` the KernelSpecs, `override` the torchtitan factory.
"""
