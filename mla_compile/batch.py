"""The inputs and outputs of a model's forward: the decode rows and prompt chunks of a batch, their places in the cache,
and the resulting hidden states.

The three classes of a batch are pytree nodes: their tensors are the leaves, so
`tree_map(lambda t: t.to(device), batch)` moves a batch and `torch.export` accepts one as an argument.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from mla_compile.torch_internals import refuse


@dataclass(frozen=True, eq=False)
class DecodeSegment:
    """Decode rows, each with the same number of query tokens; `decode_segment` builds one.

    seq_lens: keys visible to a row's last valid query token, including itself and this call's tokens before it, int32
        `[rows]`; 0 for an inactive row.
    block_table: int32 `[rows, max_pages]`.
    slot_mapping: int64 `[rows * q_len]`; -1 writes nowhere.
    page_size: tokens per page of the cache that the pages and slots belong to.
    q_len: query tokens per row in this call, >= 1.
    q_lens: valid query tokens per row if they differ, int32 `[rows]`, or None.
    backend: the decode backend to use, by name; None is the automatic choice.
    """

    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    page_size: int
    q_len: int = 1
    q_lens: Tensor | None = None
    backend: str | None = None


@dataclass(frozen=True, eq=False)
class PrefillSegment:
    """Prompt chunks, packed one after the other; `prefill_segment` builds one.

    cu_seqlens_q: prefix sum of the chunks' lengths, int32 `[rows + 1]`.
    seq_lens: context and chunk together, int32 `[rows]`.
    block_table: int32 `[rows, max_pages]`.
    slot_mapping: int64 `[tokens]`; -1 writes nowhere.
    key_slots: the slots of all keys that the chunks see, the new ones included, row after row, int64 `[parts, keys]`;
        -1 for padding. Keys are expanded one part at a time. Very long contexts are cut into several parts: each has
        many tokens of one row's context, and the last one has the rest of all rows. Other batches have one part.
    cu_seqlens_k: prefix sums of the rows' keys in each part, int32 `[parts, rows + 1]`. A padding row has none.
    host_lens: int32 `[rows, 2]` on the CPU: a chunk's length and its `seq_lens`.
    page_size: tokens per page of the cache that the pages and slots belong to.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    key_slots: Tensor
    cu_seqlens_k: Tensor
    host_lens: Tensor
    page_size: int


@dataclass(frozen=True, eq=False)
class MLABatch:
    """A call's decode rows, prompt chunks or both; an absent segment is None, never empty.

    Raises:
        MLAError: an argument that is not a segment, no segment, or two of different page sizes.
    """

    decode: DecodeSegment | None = None
    prefill: PrefillSegment | None = None

    def __post_init__(self) -> None:
        _check_segment("decode", self.decode, DecodeSegment)
        _check_segment("prefill", self.prefill, PrefillSegment)
        if self.decode is None and self.prefill is None:
            refuse("batch", "a decode segment, a prefill segment or both", "neither")
        if self.decode is not None and self.prefill is not None:
            page_sizes = self.decode.page_size, self.prefill.page_size
            if page_sizes[0] != page_sizes[1]:
                refuse("batch", "segments of one page size", f"{page_sizes[0]} and {page_sizes[1]}")

    @property
    def page_size(self) -> int:
        """Tokens per page, the same for both segments."""
        segment = self.decode or self.prefill
        assert segment is not None
        return segment.page_size


def _check_segment(name: str, segment: object, kind: type) -> None:
    if segment is not None and not isinstance(segment, kind):
        hint = f"{name}_segment returns (segment, positions): unpack it" if isinstance(segment, tuple) else ""
        refuse(f"batch.{name}", f"a {kind.__name__} or None", type(segment).__name__, hint)


def _register(kind: type, *, static: Sequence[str]) -> None:
    """Register a dataclass as a pytree node; its leaves are its fields except `static` ones and None."""
    names = [field.name for field in fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        present = [name for name in names if name not in static and getattr(value, name) is not None]
        context = (tuple(present), tuple((name, getattr(value, name)) for name in static))
        return [getattr(value, name) for name in present], context

    def unflatten(children: Any, context: tuple[Any, ...]) -> Any:
        present, rest = context
        # Without `__post_init__`'s checks: torch may replace leaves by other objects than tensors.
        value: Any = object.__new__(kind)
        for name, child in (*dict.fromkeys(names).items(), *zip(present, children, strict=True), *rest):
            object.__setattr__(value, name, child)
        return value

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, context = flatten(value)
        return [(_pytree.GetAttrKey(name), child) for name, child in zip(context[0], children)], context

    _pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{kind.__module__}.{kind.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=lambda context: (tuple(context[0]), tuple(map(tuple, context[1]))),
    )
    torch.serialization.add_safe_globals([kind])  # an exported program is saved with its example inputs


_register(DecodeSegment, static=("page_size", "q_len", "backend"))
_register(PrefillSegment, static=("page_size",))
_register(MLABatch, static=())


class ForwardOutput(NamedTuple):
    """The result of a model's forward; all tensors are of the same tokens.

    hidden: the hidden states after the final norm, `[tokens, hidden_size]`.
    aux: the outputs of the requested `aux_layers`, in their order, each `[tokens, hidden_size]`.
    """

    hidden: Tensor
    aux: tuple[Tensor, ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> "ForwardOutput":
        """Apply `change` to each tensor."""
        return ForwardOutput(change(self.hidden), tuple(change(each) for each in self.aux))
