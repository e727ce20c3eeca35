"""Sampling from filtered logits, with noise that depends on seed, position and vocabulary id alone."""
