"""Triton kernels behind the ops on CUDA; the ops' plain torch code is their twin.

The tables in the ops' files say which calls they serve. `plan.py`, pure Python, says with which tiles and grid;
`softmax.py` and `keys.py` have what the attention kernels share. No kernel's file imports another kernel's. All but
`plan.py` import triton, so each is imported by the first call that it serves.
"""
