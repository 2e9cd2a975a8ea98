"""The device operations of a step: one op a file, a Triton kernel and its plain-torch twin side by side.

A wrapper `op(...)` checks its tensors and dispatches on their device: `op_triton` on CUDA, `op_torch` elsewhere. Both
obey one law: the bits of a row's result depend on that row alone, not on the other rows, on padding, or on how a
sequence is cut into calls. Kernels know tensors and slots; requests, recipes and rows of a job are unknown here.
"""
