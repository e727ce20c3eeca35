"""Which implementation serves a decode call: the table of backends, and the choice among them.

Beside what every implementation declares, a backend says what query tokens a row may have. Nothing else in the package
asks for a backend by its name. A new one is a row of `DECODE_BACKENDS` and a function that takes `DecodeOperands`; the
conformance suite (`tests/ops/conformance.py`) runs on every row.
"""

import functools
import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.attention.tiles import KV_LORA_RANKS, ROPE_HEAD_DIMS
from mla_compile.ops.dispatch import FLOATS, HALF, Call, Candidate, Selection, describe_device, select
from mla_compile.ops.library import facts_of
from mla_compile.ops.paging import visible_keys
from mla_compile.torch_internals import is_fake

log = logging.getLogger(__name__)


class QueryLenSupport(Enum):
    """What query tokens a row may have in one call of a backend."""

    SINGLE_ONLY = "one token a row"
    UNIFORM = "the same number in every row"
    VARLEN = "any number up to q_len"


@dataclass(frozen=True)
class DecodeBackend(Candidate):
    """One implementation of `mla_decode`. Whatever it takes of q_len, it serves every decode call: see `fitting`.

    multi_token_heads: the numbers of heads with which more than one query token a row is right; None for all.
    planner: `module:object`, a `Planner`, of one that divides its work before it runs: a compiled graph plans once for
        all layers, since the plan depends on lengths and sizes only. It runs without a plan too, and plans by itself.
    """

    query_len_support: QueryLenSupport = QueryLenSupport.VARLEN
    multi_token_heads: tuple[int, ...] | None = None
    planner: str = ""

    def plan(self, operands: DecodeOperands, place: int) -> list[Tensor]:
        """What `run` takes as `plan`, for calls of these lengths and sizes; where they are fake, empty tensors."""
        planner: Planner = pkgutil.resolve_name(self.planner)
        if is_fake(operands.seq_lens):
            return planner.like(operands)
        return planner.plan(self.fitting(operands), place)

    def run(self, operands: DecodeOperands, plan: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Compute a call; `plan`: what the method of that name gave for it."""
        if plan is not None:
            out, lse = self.load()(operands, plan)
        else:
            out, lse = self.load()(self.fitting(operands))
        return out, lse

    def fitting(self, operands: DecodeOperands) -> DecodeOperands:
        """The operands as the backend takes them.

        Query tokens that it cannot take as they are become rows of one token, each with the keys that it sees: still
        decode, at the price of reading a row's latents once for each of its tokens.
        """
        support, q_len, q_lens = self.query_len_support, operands.q_len, operands.q_lens
        trusted = self.multi_token_heads
        if trusted is not None and operands.q_latent.shape[1] not in trusted:
            support = QueryLenSupport.SINGLE_ONLY
        is_uniform = q_lens is None and (q_len == 1 or support is QueryLenSupport.UNIFORM)
        if is_uniform or support is QueryLenSupport.VARLEN:
            return operands
        table = operands.block_table.repeat_interleave(q_len, dim=0)
        seq_lens = visible_keys(operands.seq_lens, q_lens, q_len).flatten()
        return operands._replace(block_table=table, seq_lens=seq_lens, q_lens=None, q_len=1)


class Planner(NamedTuple):
    """How a backend plans, by the lengths and sizes of a call alone.

    plan: gives tensors that calls read; the number is `place` of `mla_decode_plan`. like: empty ones, of fake operands.
    """

    plan: Callable[[DecodeOperands, int], list[Tensor]]
    like: Callable[[DecodeOperands], list[Tensor]]


_GLUON = DecodeBackend(
    name="gluon",
    description="loading and computing warps, for Hopper",
    function="mla_compile.ops.attention.kernels.gluon.decode:decode_gluon",
    device_types=("cuda",),
    min_capability=(9, 0),
    max_capability=(9, 0),
    packages=("triton",),
    constraints={
        "dtype": (torch.bfloat16,),
        "kv_lora_rank": range(512, 513),
        "qk_rope_head_dim": range(64, 65),
    },
)
_TRITON = DecodeBackend(
    name="triton",
    description="portable split-KV kernel without a plan",
    function="mla_compile.ops.attention.kernels.decode:decode_triton",
    device_types=("cuda",),
    min_capability=(8, 0),
    packages=("triton",),
    constraints={"dtype": FLOATS, "kv_lora_rank": KV_LORA_RANKS, "qk_rope_head_dim": ROPE_HEAD_DIMS},
)
DECODE_BACKENDS = (
    DecodeBackend(
        name="flashinfer",
        description="FlashInfer's MLA kernels, planned on the host",
        function="mla_compile.ops.attention.kernels.flashinfer_mla:decode_flashinfer",
        query_len_support=QueryLenSupport.UNIFORM,
        capturable=False,
        planner="mla_compile.ops.attention.kernels.flashinfer_mla:PLANNER",
        device_types=("cuda",),
        min_capability=(8, 0),
        # In 0.6.18 its causal mask is wrong where a tile of 64 or 128 query rows splits a token's heads.
        multi_token_heads=(16, 32, 64, 128),
        packages=("flashinfer",),
        constraints={"dtype": HALF, "kv_lora_rank": range(512, 513), "qk_rope_head_dim": range(64, 65)},
    ),
    _GLUON,
    replace(
        _GLUON,
        name="gluon_invariant",
        description="the kernels for Hopper over splits that follow from a key's place",
        function="mla_compile.ops.attention.kernels.gluon.decode:decode_gluon_invariant",
        batch_invariant=True,
    ),
    _TRITON,
    replace(
        _TRITON,
        name="triton_invariant",
        description="the portable kernel over splits that follow from a key's place",
        function="mla_compile.ops.attention.kernels.decode:decode_triton_invariant",
        batch_invariant=True,
    ),
    DecodeBackend(
        name="reference",
        description="plain torch, any device",
        function="mla_compile.ops.attention.decode:decode_torch",
        constraints={"dtype": (*FLOATS, torch.float64)},
    ),
    DecodeBackend(
        name="by_token",
        description="plain torch, a token at a time, any device",
        function="mla_compile.ops.attention.decode:decode_by_token",
        constraints={"dtype": (*FLOATS, torch.float64)},
        batch_invariant=True,
    ),
)
"""Fastest first, the order of the automatic choice. `reference` serves every call, and `by_token` every one that asks
for a batch-invariant row."""


def decode_call(operands: DecodeOperands, *, captured: bool, batch_invariant: bool = False) -> Call:
    """The call that these operands make. They may be fake: symbolic sizes are not known."""
    facts = facts_of("mla_decode", operands)
    known = {name: fact for name, fact in facts.items() if not isinstance(fact, torch.SymInt)}
    return Call(*describe_device(operands.q_latent.device), captured, known, batch_invariant)


@functools.cache
def select_backend(
    call: Call, name: str | None = None, argument: str = "backend"
) -> Selection[DecodeBackend]:
    """The backend called `name`, else the first of `DECODE_BACKENDS` that serves a call.

    Raises:
        MLAError: `name` is unknown or that backend cannot serve the call; the message names the `argument`, the reason
            and the backends that can.
    """
    if name is None:
        selection = select(DECODE_BACKENDS, call)
        log.debug("decode backend of %s:\n%s", call, selection.explain())  # once for each kind of call
        return selection
    check_name(argument, name)
    named = backend_named(name)
    if (reason := named.why_not(call)) is not None:
        able = ", ".join(backend.name for backend in DECODE_BACKENDS if backend.why_not(call) is None)
        raise MLAError(argument, f"one that serves this call ({able})", f"{name}, which {reason}")
    return Selection(named)


def backend_named(name: str) -> DecodeBackend:
    """The backend of that name, which there must be."""
    return next(backend for backend in DECODE_BACKENDS if backend.name == name)


def check_name(argument: str, name: object) -> None:
    """Raises `MLAError`, of the argument, for something that is no backend's name; None is the automatic choice."""
    names = [backend.name for backend in DECODE_BACKENDS]
    if name is not None and name not in names:
        raise MLAError(argument, f"one of {', '.join(names)}, or None", repr(name))
