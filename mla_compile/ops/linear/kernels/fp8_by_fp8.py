"""`fp8_linear` of many tokens that are quantised to FP8 too, by cuBLAS."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops.linear.fp8 import each_matrix
from mla_compile.ops.linear.kernels.fp8 import quantize_triton
from mla_compile.ops.linear.operands import FP8LinearOperands

CUDA = torch.version.cuda
if CUDA is not None and tuple(map(int, CUDA.split("."))) < (12, 9):
    raise ImportError(f"cuBLAS multiplies blocks of FP8 from CUDA 12.9 on; this torch was built with {CUDA}")


def linear_fp8_activations(operands: FP8LinearOperands) -> Tensor:
    """`fp8_linear` of tokens that are quantised to FP8, by cuBLAS, which adds the scaled sums of blocks in float32."""
    values, scales = quantize_triton(operands.x)
    of_tokens, of_weights = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        if missing := -scale.shape[1] % 4:  # cuBLAS requires a multiple
            scale = F.pad(scale, (0, missing))
        of_x = values, weight.t(), scales.t(), of_tokens, scale.t(), of_weights
        out: Tensor = F.scaled_mm(*of_x, output_dtype=x.dtype)
        return out[: len(x)]

    return each_matrix(product, operands)
