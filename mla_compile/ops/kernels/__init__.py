"""Triton kernels behind `mla_decode` and `moe_experts` on CUDA; the plain torch code of the ops is their twin.

`plan.py` is pure Python: whether a kernel serves a call, and with which tiles and grid. `decode.py` and `moe.py` import
triton and so are imported on first use, by an op that was given CUDA tensors.
"""
