"""One AdamW step on one tensor, fused and in place.

Inert; import the part you need: `op` the function, `optimizer` the torch.optim class, `spec` the KernelSpec.
"""
