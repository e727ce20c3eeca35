"""Triton kernels: the candidates of these ops on CUDA. Each imports Triton, so the first call imports it."""
