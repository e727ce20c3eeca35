"""Triton kernels behind `mla_append`, `mla_decode`, `mla_masked_decode`, `mla_prefill` and `moe_experts` on CUDA.

The ops' plain torch code is their twin.

`plan.py` is pure Python: whether a kernel serves a call (for decode, `ops/backends.py` says that), and with which
tiles and grid. The others import triton and so are imported on first use, by an op that was given CUDA tensors.
"""
