"""Which rows of a step decode, with how many query tokens, and which take the prefill path."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_compile.errors import MLAError
from mla_compile.ops.backends import QueryLenSupport


@dataclass(frozen=True)
class RowLayout:
    """Rows by their index, in the order given.

    decode: rows of the decode segment.
    q_len: query tokens of each of them, padding included; 0 where there is none.
    q_lens: how many of these are valid, where they differ from `q_len`; else None.
    prefill: rows of the prefill segment.
    """

    decode: list[int]
    q_len: int
    q_lens: list[int] | None
    prefill: list[int]


def classify(
    query_lens: Sequence[int], *, threshold: int, support: QueryLenSupport, padded: bool
) -> RowLayout:
    """Deal rows that have sampled since their caches were last built to decode and prefill.

    Rows that have not, prompts and preempted rows, prefill whatever their length: they do not come here.

    Args:
        query_lens: query tokens of each row in this step, >= 1.
        threshold: up to so many are decode, >= 1: 1 + the drafts of a step, or 1 for a SINGLE_ONLY backend that is not
            to get its query tokens as rows of one token each.
        support: of the decode backend. SINGLE_ONLY takes what VARLEN does, flattened.
        padded: give all rows `threshold` query tokens, so that one captured shape serves every step. Otherwise a
            UNIFORM backend decodes the rows of the smallest length only.

    Raises:
        MLAError: a length or a threshold < 1.
    """
    if threshold < 1:
        raise MLAError("threshold", "at least 1", threshold)
    if any(length < 1 for length in query_lens):
        raise MLAError("query_lens", "at least one token a row", list(query_lens))
    decode = [row for row, length in enumerate(query_lens) if length <= threshold]
    if not padded and support is QueryLenSupport.UNIFORM:
        shortest = min((query_lens[row] for row in decode), default=0)
        decode = [row for row in decode if query_lens[row] == shortest]
    lens = [query_lens[row] for row in decode]
    q_len = (threshold if padded else max(lens)) if lens else 0
    chosen = set(decode)
    return RowLayout(
        decode=decode,
        q_len=q_len,
        q_lens=None if all(length == q_len for length in lens) else lens,
        prefill=[row for row in range(len(query_lens)) if row not in chosen],
    )
