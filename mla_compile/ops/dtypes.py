"""The dtype in which plain torch computes."""

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
