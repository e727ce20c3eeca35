"""Which implementation serves a decode call: the table of backends, each with what it takes, and the choice among them.

Nothing else in the package asks for a backend by its name. A new one is a row of `DECODE_BACKENDS` and a function
with the arguments of `mla_decode`; the conformance suite (`tests/ops/conformance.py`) runs on every row.
"""

import functools
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.kernels.plan import KV_LORA_RANKS, ROPE_HEAD_DIMS
from mla_compile.ops.paging import flatten_to_single

log = logging.getLogger(__name__)

ANY = range(2**31)
"""Every size."""


class QueryLenSupport(Enum):
    """What query tokens a row may have in one call of a backend."""

    SINGLE_ONLY = "one token a row"
    UNIFORM = "the same number in every row"
    VARLEN = "any number up to q_len"


@dataclass(frozen=True)
class DecodeCall:
    """What decides who can serve a decode call: sizes and the device, no value of a tensor.

    None stands for what is not known: a symbolic size, or everything but the device when only that is asked about.
    """

    device_type: str
    """"cpu", "cuda", "hip" (an AMD GPU, which torch calls "cuda" too) or another one of torch's."""
    capability: tuple[int, int] | None = None
    """Of a CUDA device."""
    dtype: torch.dtype | None = None
    heads: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    page_size: int | None = None
    q_len: int | None = None
    has_q_lens: bool | None = None
    """Whether the rows' query lengths differ, or some row is inactive."""
    captured: bool | None = None
    """Whether the call may be recorded in a CUDA graph, so that nothing may be read or computed on the host."""


@dataclass(frozen=True)
class DecodeBackend:
    """One implementation of `mla_decode`. Whatever it takes of q_len, it serves every decode call: see `run`."""

    name: str
    description: str
    function: str
    """`module:function`, imported by the first call. It gets the positional arguments of `mla_decode`'s op."""
    query_len_support: QueryLenSupport
    capturable: bool
    """Whether a call does no work on the host that depends on values."""
    dtypes: tuple[torch.dtype, ...]
    device_types: tuple[str, ...] | None = None
    """None: all."""
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] | None = None
    heads: range = ANY
    multi_token_heads: tuple[int, ...] | None = None
    """The numbers of heads with which more than one query token a row is right; None: all."""
    kv_lora_rank: range = ANY
    qk_rope_head_dim: range = ANY
    page_sizes: range = ANY
    packages: tuple[str, ...] = ()
    """Python packages that it needs, as they are imported."""

    def why_not(self, call: DecodeCall) -> str | None:
        """The first reason why it cannot serve a call, with the values; None where it can."""
        return next(self._reasons(call), None)

    def _reasons(self, call: DecodeCall) -> Iterator[str]:
        if self.device_types is not None and call.device_type not in self.device_types:
            yield f"runs on {' and '.join(self.device_types)}, got {call.device_type}"
        if call.capability is not None:
            newest = self.max_capability
            if call.capability < self.min_capability or (newest is not None and call.capability > newest):
                yield f"runs on {self.architectures()}, got {_sm(call.capability)}"
        for package in self.packages:
            if not _installed(package):
                yield f"needs the Python package {package}, which is not installed"
        if call.dtype not in (None, *self.dtypes):
            yield f"takes {', '.join(map(short_name, self.dtypes))}, got {short_name(call.dtype)}"
        if call.heads is not None and call.heads not in self.heads:
            yield f"takes heads of {_words(self.heads)}, got {call.heads}"
        rank, rope = call.kv_lora_rank, call.qk_rope_head_dim
        if (rank is not None and rank not in self.kv_lora_rank) or (
            rope is not None and rope not in self.qk_rope_head_dim
        ):
            yield f"takes kv_lora_rank + qk_rope_head_dim of {self.widths()}, got {rank} + {rope}"
        if call.page_size is not None and call.page_size not in self.page_sizes:
            yield f"takes a page_size of {_words(self.page_sizes)}, got {call.page_size}"
        if call.captured and not self.capturable:
            yield "works on the host in every call, so it serves eager calls that ask for it by name only"

    def architectures(self) -> str:
        """The GPUs it runs on, in words."""
        if self.max_capability == self.min_capability:
            return _sm(self.min_capability)
        newest = self.max_capability
        return f"{_sm(self.min_capability)} {'and newer' if newest is None else f'to {_sm(newest)}'}"

    def widths(self) -> str:
        """Its kv_lora_rank + qk_rope_head_dim, in words."""
        return f"{_words(self.kv_lora_rank)} + {_words(self.qk_rope_head_dim)}"

    def flattens(self, call: DecodeCall) -> bool:
        """Whether it gets the query tokens of a call as rows of one token each."""
        support = self.query_len_support
        if self.multi_token_heads is not None and call.heads not in self.multi_token_heads:
            support = QueryLenSupport.SINGLE_ONLY
        if support is QueryLenSupport.VARLEN:
            return False
        return bool(call.has_q_lens) or (support is QueryLenSupport.SINGLE_ONLY and call.q_len != 1)

    def run(
        self,
        call: DecodeCall,
        q_latent: Tensor,
        q_pe: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        q_lens: Tensor | None,
        q_len: int,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Compute `mla_decode`, of which `call` was made by `decode_call`.

        What the backend cannot take of several or ragged query tokens reaches it as rows of one token, each with the
        keys that it sees: still decode, at the price of reading a row's latents once for each of its tokens.
        """
        if self.flattens(call):
            tokens = torch.arange(q_latent.shape[0], device=seq_lens.device)
            block_table, seq_lens = flatten_to_single(tokens, block_table, seq_lens, q_lens, q_len)
            q_lens, q_len = None, 1
        out, lse = _imported(self.function)(
            q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale
        )
        return out, lse


_HALF = (torch.float16, torch.bfloat16)

DECODE_BACKENDS = (
    DecodeBackend(
        name="flashinfer",
        description="FlashInfer's MLA kernels, planned on the host",
        function="mla_compile.ops.kernels.flashinfer_mla:decode_flashinfer",
        query_len_support=QueryLenSupport.UNIFORM,
        capturable=False,
        dtypes=_HALF,
        device_types=("cuda",),
        min_capability=(8, 0),
        # Of its causal mask only: in 0.6.18 it is wrong where a tile of 64 or 128 query rows splits a token's heads.
        multi_token_heads=(16, 32, 64, 128),
        kv_lora_rank=range(512, 513),
        qk_rope_head_dim=range(64, 65),
        packages=("flashinfer",),
    ),
    DecodeBackend(
        name="gluon",
        description="loading and computing warps, for Hopper",
        function="mla_compile.ops.kernels.gluon_decode:decode_gluon",
        query_len_support=QueryLenSupport.VARLEN,
        capturable=True,
        dtypes=(torch.bfloat16,),
        device_types=("cuda",),
        min_capability=(9, 0),
        max_capability=(9, 0),
        kv_lora_rank=range(512, 513),
        qk_rope_head_dim=range(64, 65),
        packages=("triton",),
    ),
    DecodeBackend(
        name="triton",
        description="portable split-KV kernel without a plan",
        function="mla_compile.ops.kernels.decode:decode_triton",
        query_len_support=QueryLenSupport.VARLEN,
        capturable=True,
        dtypes=(*_HALF, torch.float32),
        device_types=("cuda",),
        min_capability=(8, 0),
        kv_lora_rank=KV_LORA_RANKS,
        qk_rope_head_dim=ROPE_HEAD_DIMS,
        packages=("triton",),
    ),
    DecodeBackend(
        name="reference",
        description="plain torch, any device",
        function="mla_compile.ops.decode:decode_torch",
        query_len_support=QueryLenSupport.VARLEN,
        capturable=True,
        dtypes=(*_HALF, torch.float32, torch.float64),
    ),
)
"""Fastest first, the order of the automatic choice. The last one serves every call."""


def decode_call(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    *,
    captured: bool,
) -> DecodeCall:
    """The call that these arguments of `mla_decode` make. They may be fake: symbolic sizes become None."""
    device_type, capability = describe_device(q_latent.device)
    return DecodeCall(
        device_type=device_type,
        capability=capability,
        dtype=q_latent.dtype,
        heads=_known(q_latent.shape[1]),
        kv_lora_rank=_known(q_latent.shape[2]),
        qk_rope_head_dim=_known(q_pe.shape[2]),
        page_size=_known(kv_cache.shape[1]),
        q_len=_known(q_len),
        has_q_lens=q_lens is not None,
        captured=captured,
    )


@dataclass(frozen=True)
class Selection:
    """The backend that serves a call, and why the faster ones do not."""

    backend: DecodeBackend
    passed_over: tuple[tuple[str, str], ...]
    """Names with reasons."""

    def explain(self) -> str:
        """A line for each backend that was looked at."""
        lines = [f"{name}: {reason}" for name, reason in self.passed_over]
        return "\n".join([*lines, f"{self.backend.name}: chosen ({self.backend.description})"])


@functools.cache
def select_backend(call: DecodeCall, name: str | None = None, argument: str = "backend") -> Selection:
    """The backend called `name`, else the first of `DECODE_BACKENDS` that serves a call.

    Raises:
        MLAError: `name` is unknown or that backend cannot serve the call; the message names the `argument`, the reason
            and the backends that can.
    """
    reasons = {backend.name: backend.why_not(call) for backend in DECODE_BACKENDS}
    serving = [backend for backend in DECODE_BACKENDS if reasons[backend.name] is None]
    if name is not None:
        check_name(argument, name)
        if (reason := reasons[name]) is not None:
            able = ", ".join(backend.name for backend in serving)
            raise MLAError(argument, f"one that serves this call ({able})", f"{name}, which {reason}")
        return Selection(next(backend for backend in serving if backend.name == name), ())
    passed_over = []
    for other, reason in reasons.items():
        if reason is None:
            break
        passed_over.append((other, reason))
    selection = Selection(serving[0], tuple(passed_over))
    log.debug("decode backend of %s:\n%s", call, selection.explain())  # once for each kind of call
    return selection


def check_name(argument: str, name: object) -> None:
    """Raises `MLAError`, of the argument, for something that is no backend's name; None is the automatic choice."""
    names = [backend.name for backend in DECODE_BACKENDS]
    if name is not None and name not in names:
        raise MLAError(argument, f"one of {', '.join(names)}, or None", repr(name))


@functools.cache
def describe_device(device: torch.device) -> tuple[str, tuple[int, int] | None]:
    """`device_type` and `capability` of a `DecodeCall`."""
    if device.type != "cuda":
        return device.type, None
    return ("cuda", torch.cuda.get_device_capability(device)) if torch.version.hip is None else ("hip", None)


def _known(size: Any) -> int | None:
    return size if isinstance(size, int) else None


@functools.cache
def _imported(function: str) -> Callable[..., Any]:
    found: Callable[..., Any] = pkgutil.resolve_name(function)
    return found


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def short_name(dtype: object) -> str:
    """Of a dtype, "bfloat16" say."""
    return str(dtype).removeprefix("torch.")


def _sm(capability: tuple[int, int]) -> str:
    return f"SM {capability[0]}{capability[1]}"


def _words(sizes: range) -> str:
    if sizes == ANY:
        return "any"
    if len(sizes) == 1:
        return str(sizes[0])
    return f"{sizes[0]}..{sizes[-1]}" + (f" by {sizes.step}" if sizes.step > 1 else "")
