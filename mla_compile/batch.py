"""What a model's forward reads and gives: which of its packed tokens are decode rows and which are prompt chunks, where
they live, and the hidden states that come of them.

The three classes of a batch are pytree nodes: their tensors are the leaves, so
`tree_map(lambda t: t.to(device), batch)` moves a batch and `torch.export` takes one as an argument.
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
    """Rows that decode, each with the same number of query tokens; `decode_segment` makes one.

    seq_lens: keys visible to a row's last valid query token, that one included and those before it in this call, int32
        `[rows]`; 0 for an inactive row.
    block_table: int32 `[rows, max_pages]`.
    slot_mapping: int64 `[rows * q_len]`; -1 writes nowhere.
    page_size: tokens a page, those of the cache that the pages and slots belong to.
    q_len: query tokens per row in this call, >= 1.
    q_lens: valid query tokens per row where they differ, int32 `[rows]`, or None.
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
    """Prompt chunks, packed one after the other; `prefill_segment` makes one.

    cu_seqlens_q: prefix sum of the chunks' lengths, int32 `[rows + 1]`.
    seq_lens: context and chunk together, int32 `[rows]`.
    block_table: int32 `[rows, max_pages]`.
    slot_mapping: int64 `[tokens]`; -1 writes nowhere.
    key_slots: the slots of all keys that the chunks see, the new ones too, row after row, int64 `[parts, keys]`; -1 for
        padding. Keys are expanded a part at a time. There is one part, but for contexts of very many tokens: then each
        of the others has many tokens of one row's context, and the last one all that is left.
    cu_seqlens_k: prefix sums of the rows' keys in each part, int32 `[parts, rows + 1]`. A row of padding has none.
    host_lens: int32 `[rows, 2]` on the CPU: a chunk's length and its `seq_lens`.
    page_size: tokens a page, those of the cache that the pages and slots belong to.
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
    """A call's decode rows, prompt chunks or both; a segment that the batch lacks is None, never empty.

    Raises:
        MLAError: something else than a segment, no segment, or two of different page sizes.
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
        """Tokens a page, of both segments."""
        segment = self.decode or self.prefill
        assert segment is not None
        return segment.page_size


def _check_segment(name: str, segment: object, kind: type) -> None:
    if segment is not None and not isinstance(segment, kind):
        hint = f"{name}_segment returns (segment, positions): unpack it" if isinstance(segment, tuple) else ""
        refuse(f"batch.{name}", f"a {kind.__name__} or None", type(segment).__name__, hint)


def _register(kind: type, *, static: Sequence[str]) -> None:
    """Make a dataclass a pytree node whose leaves are its fields, but for the `static` ones and those that are None."""
    names = [field.name for field in fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        present = [name for name in names if name not in static and getattr(value, name) is not None]
        context = (tuple(present), tuple((name, getattr(value, name)) for name in static))
        return [getattr(value, name) for name in present], context

    def unflatten(children: Any, context: tuple[Any, ...]) -> Any:
        present, rest = context
        # Unchecked: torch puts other things than tensors in the place of leaves.
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
    """What a model's forward gives, of the same tokens throughout.

    hidden: the hidden states after the final norm, `[tokens, hidden_size]`.
    aux: the outputs of the layers that were asked for as `aux_layers`, in their order, each `[tokens, hidden_size]`.
    """

    hidden: Tensor
    aux: tuple[Tensor, ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> "ForwardOutput":
        """With `change` made to each tensor."""
        return ForwardOutput(change(self.hidden), tuple(change(each) for each in self.aux))
