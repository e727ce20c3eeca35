"""Sums and argmax along the last dimension."""
