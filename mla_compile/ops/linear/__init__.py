"""Products by weights: of the dtype of x and in block FP8, batch-invariant, by head, behind a norm."""
