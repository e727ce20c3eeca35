"""Matmuls by weights in the dtype of x or in block FP8: batch-invariant, per head, fused with a norm."""
