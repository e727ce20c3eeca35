"""Triton kernels: the CUDA candidates of the attention ops. They import Triton, so the first call imports it."""
