"""The dispatch table of `mla_decode`: decode backends, and the choice among them.

A backend is a candidate that also declares how many query tokens the rows of a call may have. Nothing else in the
package asks for a backend by its name. A new one is an entry of `DECODE_BACKENDS` and a function that takes
`DecodeOperands`; the conformance suite (`tests/ops/conformance.py`) runs on every entry.
"""

import functools
import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.latents import FP8
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.attention.tiles import KV_LORA_RANKS, ROPE_HEAD_DIMS
from mla_compile.ops.dispatch import FLOATS, HALF, Call, Candidate, Selection, describe_device, select
from mla_compile.ops.library import facts_of
from mla_compile.ops.paging import visible_keys

log = logging.getLogger(__name__)

MANY_QUERIES, MANY_QUERIES_OF_ROW = 512, 64
"""Queries of a call, tokens x heads, and of one of its rows, q_len x heads, from which FlashMLA serves. On an H100
it takes up to 24% less time than our kernels there, and at most 4% more. With 16 and 20 queries a row neither is faster
in general."""
QUERIES = "queries"
"""A fact of a call, "many" or "few". It limits the automatic choice alone: a backend that is named serves both."""


class QueryLenSupport(Enum):
    """How many query tokens the rows of one call of a backend may have."""

    SINGLE_ONLY = "one token a row"
    UNIFORM = "the same number in every row"
    VARLEN = "any number up to q_len"


@dataclass(frozen=True)
class DecodeBackend(Candidate):
    """One implementation of `mla_decode`. It serves every q_len, whatever `query_len_support` is: see `fitting`.

    multi_token_heads: the numbers of heads that work with more than one query token a row; None for all.
    planner: `module:object`, a `Planner`, for a backend that divides its work before it runs. A compiled graph plans
        once for all layers, since the plan depends on lengths and sizes only. Without a plan the backend makes its own.
    """

    query_len_support: QueryLenSupport = QueryLenSupport.VARLEN
    multi_token_heads: tuple[int, ...] | None = None
    planner: str = ""

    def plan(self, operands: DecodeOperands, place: int, *, unused: bool = False) -> list[Tensor]:
        """The argument `plan` of `run`, for calls with these lengths and sizes; unused: uninitialised."""
        planner: Planner = pkgutil.resolve_name(self.planner)
        return planner.like(operands) if unused else planner.plan(self.fitting(operands), place)

    def run(self, operands: DecodeOperands, plan: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Compute a call; `plan`: the result of the method of that name."""
        if plan is not None:
            out, lse = self.load()(operands, plan)
        else:
            out, lse = self.load()(self.fitting(operands))
        return out, lse

    def fitting(self, operands: DecodeOperands) -> DecodeOperands:
        """The operands in the form that the backend supports.

        Rows with too many query tokens become rows of one token, each with the keys that the token sees. They are still
        decoded, but a row's latents are read once for each of its tokens.
        """
        support, q_len, q_lens = self.query_len_support, operands.q_len, operands.q_lens
        supported = self.multi_token_heads
        if supported is not None and operands.q_latent.shape[1] not in supported:
            support = QueryLenSupport.SINGLE_ONLY
        is_uniform = q_lens is None and (q_len == 1 or support is QueryLenSupport.UNIFORM)
        if is_uniform or support is QueryLenSupport.VARLEN:
            return operands
        table = operands.block_table.repeat_interleave(q_len, dim=0)
        seq_lens = visible_keys(operands.seq_lens, q_lens, q_len).flatten()
        return operands._replace(block_table=table, seq_lens=seq_lens, q_lens=None, q_len=1)


class Planner(NamedTuple):
    """Functions that make a plan, from the lengths and sizes of a call alone.

    plan: returns the tensors that calls read; the number is `place` of `mla_decode_plan`. like: returns empty tensors
        of the same shapes, also for fake operands.
    """

    plan: Callable[[DecodeOperands, int], list[Tensor]]
    like: Callable[[DecodeOperands], list[Tensor]]


_WIDTHS = {"kv_lora_rank": range(512, 513), "qk_rope_head_dim": range(64, 65)}
"""DeepSeek's, for which kernels for one kind of GPU are written."""
_GLUON = DecodeBackend(
    name="gluon",
    description="loading and computing warps, for Hopper",
    function="mla_compile.ops.attention.kernels.gluon.decode:decode_gluon",
    device_types=("cuda",),
    min_capability=(9, 0),
    max_capability=(9, 0),
    packages=("triton",),
    constraints={"dtype": (torch.bfloat16,), "kv_cache.dtype": (torch.bfloat16, FP8), **_WIDTHS},
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
        # In 0.6.18 its causal mask is wrong where a tile of 64 or 128 queries splits a token's heads.
        multi_token_heads=(16, 32, 64, 128),
        packages=("flashinfer",),
        constraints={"dtype": HALF, "kv_cache.dtype": HALF, **_WIDTHS},
    ),
    DecodeBackend(
        name="flash_mla",
        description="FlashMLA's kernels for Hopper, planned on the device",
        function="mla_compile.ops.attention.kernels.flash_mla:decode_flash_mla",
        planner="mla_compile.ops.attention.kernels.flash_mla:PLANNER",
        device_types=("cuda",),
        min_capability=(9, 0),
        max_capability=(9, 0),
        packages=("flash_mla", "triton"),
        constraints={
            "dtype": HALF,
            "kv_cache.dtype": HALF,
            **_WIDTHS,
            "page_size": range(64, 65),
            QUERIES: ("many",),
        },
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
"""Fastest first, the order of the automatic choice. `reference` serves every call, and `by_token` every call that asks
for batch invariance."""


def decode_call(operands: DecodeOperands, *, captured: bool, batch_invariant: bool = False) -> Call:
    """The `Call` of these operands, which may be fake: symbolic sizes are unknown."""
    facts = facts_of("mla_decode", operands)
    known = {name: fact for name, fact in facts.items() if not isinstance(fact, torch.SymInt)}
    return Call(*describe_device(operands.q_latent.device), captured, known, batch_invariant)


def facts_of_queries(q_latent: Tensor, q_len: int) -> dict[str, object]:
    """The fact `QUERIES` of a call; none if a symbolic number of tokens decides."""
    of_row: Any = q_len * q_latent.shape[1]
    of_call: Any = q_latent.shape[0] * q_latent.shape[1]
    if isinstance(of_row, torch.SymInt):
        return {}
    if of_row < MANY_QUERIES_OF_ROW:
        return {QUERIES: "few"}
    if isinstance(of_call, torch.SymInt):
        return {}
    return {QUERIES: "many" if of_call >= MANY_QUERIES else "few"}


def of_any_size(call: Call) -> Call:
    """The same call with any number of queries."""
    return replace(call, facts={fact: value for fact, value in call.facts.items() if fact != QUERIES})


@functools.cache
def select_backend(
    call: Call, name: str | None = None, argument: str = "backend"
) -> Selection[DecodeBackend]:
    """The backend called `name`, or without a name the first of `DECODE_BACKENDS` that serves a call.

    Raises:
        MLAError: `name` is unknown or that backend cannot serve the call; the message names the `argument`, the reason
            and the backends that can.
    """
    if name is None:
        selection = select(DECODE_BACKENDS, call)
        log.debug("decode backend of %s:\n%s", call, selection.explain())  # once for each kind of call
        return selection
    check_name(argument, name)
    named, call = backend_named(name), of_any_size(call)
    if (reason := named.why_not(call)) is not None:
        able = ", ".join(backend.name for backend in DECODE_BACKENDS if backend.why_not(call) is None)
        raise MLAError(argument, f"one that serves this call ({able})", f"{name}, which {reason}")
    return Selection(named)


def backend_named(name: str) -> DecodeBackend:
    """The backend of that name, which must exist."""
    return next(backend for backend in DECODE_BACKENDS if backend.name == name)


def check_name(argument: str, name: object) -> None:
    """Raises `MLAError` for an argument that is not a backend's name; None is the automatic choice."""
    names = [backend.name for backend in DECODE_BACKENDS]
    if name is not None and name not in names:
        raise MLAError(argument, f"one of {', '.join(names)}, or None", repr(name))
