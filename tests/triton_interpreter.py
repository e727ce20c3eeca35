"""Triton kernels without a GPU, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, and Inductor's kernels must not see it: interpreted tests are in
files that pytest does not collect by itself (`tests/ops/interpreted/`), and run in separate processes.

Private parts of Triton are patched, as its interpreter has no public way to change how it runs.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).parent / "ops" / "interpreted"


def run_interpreted(marks: str) -> None:
    """Runs tests of `tests/ops/interpreted/` with these marks, in one process; a failure shows their report."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
        *map(str, sorted(INTERPRETED.glob("*.py"))),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, cwd=INTERPRETED.parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def mend_interpreter() -> None:
    """What the interpreter of triton 3.6 lacks: `range` over kernel scalars under NumPy 2.4, bfloat16 products, float32
    of the smallest bfloat16 numbers, and the nearest bfloat16 or e4m3 of a float32 number.

    And speed: without it the tests take three times as long.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    cast, to_fp = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_fp_to_fp

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(operand):
        if operand.dtype != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def nearest(operand):
        bits = np.atleast_1d(operand.data).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
        data = np.where(np.isnan(operand.data), np.uint16(0x7FC0), rounded.reshape(operand.data.shape))
        return interpreter.TensorHandle(data, tl.bfloat16)

    def converted(self, operand, dtype):
        kinds = operand.dtype.scalar, dtype.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return widened(operand)
        return nearest(operand) if kinds == (tl.float32, tl.bfloat16) else cast(self, operand, dtype)

    def converted_e4m3(self, operand, dtype, rounding):
        kinds, data = (operand.dtype.scalar, dtype.scalar), torch.from_numpy(operand.data.copy())
        if kinds == (tl.float32, tl.float8e4nv):
            data = data.to(torch.float8_e4m3fn).view(torch.uint8)
        elif kinds == (tl.float8e4nv, tl.float32):
            data = data.view(torch.float8_e4m3fn).to(torch.float32)
        else:
            return to_fp(self, operand, dtype, rounding)
        return interpreter.TensorHandle(data.numpy(), dtype.scalar)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_fp_to_fp = converted_e4m3
    interpreter.InterpreterBuilder.cast_impl = converted
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(
        self, widened(a), widened(b), *rest
    )
    _patch_language_once_a_launch()
    _keep_types_of_tensors()


def _patch_language_once_a_launch() -> None:
    """Patches once, not for every kernel that another calls, and finds Triton's built-in functions once."""
    import inspect

    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @cache
    def builtins_of(language):
        return [name for name, member in inspect.getmembers(language) if tl.core.is_builtin(member)]

    @cache
    def languages_of(kernel):
        return [language for language in (tl, tl.core) if language in kernel.__globals__.values()]

    def patch_builtins(language, builder, scope):
        for name in builtins_of(language):
            interpreter._patch_attr(language, name, getattr(language, name), builder, scope)

    def patch_once(kernel):
        if any(tl.core.is_builtin(language.load) for language in languages_of(kernel)):
            return patch(kernel)
        return interpreter._LangPatchScope()

    interpreter._patch_builtin = patch_builtins
    interpreter._patch_lang = patch_once


def _keep_types_of_tensors() -> None:
    """Caches dtypes, shapes and sizes, which Triton makes again for every tensor.

    Sums of indices are computed once, without a second sum in int64 that detects overflow: tests have small ones.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    of_scalar = cache(interpreter._get_np_dtype)

    def np_dtype(type):
        scalar = type.scalar
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    @cache
    def block(*shape):
        shape = tl.tuple([getattr(size, "value", size) for size in shape])
        return shape, tl.core.validate_block_shape(shape), str(shape)

    def new_block_type(self, element_ty, shape):
        self.element_ty = element_ty
        self.shape, self.numel, text = block(*shape)
        self.name = f"<{text}, {element_ty}>"

    @cache
    def constants(*shape):
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def new_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(*(type.shape if type.is_block() else ()))

    interpreter._get_np_dtype = np_dtype
    tl.block_type.__init__ = new_block_type
    tl.tensor.__init__ = new_tensor
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def add_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles add along k in order, like a GPU's plain cores. (NumPy's order depends on the tile.)"""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def values(operand):
        return (
            (operand.data.astype(np.uint32) << 16).view(np.float32)
            if operand.dtype == tl.bfloat16
            else operand.data
        )

    def in_order(self, a, b, acc, *rest):
        left, right, total = values(a), values(b), acc.data.copy()
        for k in range(left.shape[-1]):
            total += left[..., k, None] * right[..., None, k, :]
        return interpreter.TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", in_order)
