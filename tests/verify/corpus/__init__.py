"""Wrong kernels and their correct twins, one pair per mechanism, small and fast.

The kernels are written in eager torch with the steps a fused kernel takes, so that a pair costs
milliseconds; the interpreter and the GPU are covered by the built-in kernels' own tests.
"""
