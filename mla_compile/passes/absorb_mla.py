"""Rewrite MLA attention that is written in its expanded form, in plain PyTorch, to the absorbed form where it pays.

    before                                          after

    kv_c ─> kv_b_proj ─> split ─┬─> v ──────┐       q_nope ─> w_uk ─> (· kv_c) ─┐
                       k_nope <─┘           │       q_pe ───────────> (· k_pe) ─┴─> scores ─> mask ─> softmax ─┐
    k_pe ─> expand ─> cat ─> k ─> attention ┴─> o                    o <─ w_uv <─ (weights · kv_c) <───────────┘
                               q ──┘

In `absorption/`, `pattern` finds it, `index_map` sees through the way it is written, `checks` says what speaks against
it and `cost` where it pays: for decode, not for prefill. The rewrite moves brackets in products of matrices, so it
holds for any mask; what lies between the two products of an attention spelled out stays as it is.

A fused attention becomes one `mla_masked_decode` on the latents under the mask as it was, or products and a softmax
where keys and values are made of different latents.

The log, `TORCH_LOGS="+mla_compile"`, says what was absorbed, and why other attention that looks like MLA was not.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.passes.absorption import form
from mla_compile.passes.absorption.checks import cost_sizes, refusal, superseded
from mla_compile.passes.absorption.form import Reader
from mla_compile.passes.absorption.match import Match
from mla_compile.passes.absorption.operands import Operands, operands_of
from mla_compile.passes.absorption.pattern import find
from mla_compile.passes.absorption.products import SUMMED
from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import argument, tensor_of
from mla_compile.passes.provenance import where

log = logging.getLogger(__name__)


def absorb_mla(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without MLA in expanded form is left untouched."""
    for found in find(gm.graph):
        reason = (refusal(found) or _absorb(found)) if isinstance(found, Match) else found.reason
        if reason is not None:
            log.info("not absorbed: %s: %s", where(found.node), reason)
    return gm


def _absorb(match: Match) -> str | None:
    """Rewrite one attention; else the reason why its tensors cannot be read as they lie."""
    read = operands_of(match)
    if read is None:
        return "the weight or the latents are laid out in a way that slices and `unflatten` cannot undo"
    old, query = superseded(match), match.keys.query.node
    name, sizes = where(match.node), cost_sizes(match)
    # The new nodes replace ones that need no gradient, whatever the mode is now.
    with torch.no_grad():
        if match.fused:
            how = "attention on masked latents"
            _emit_fused(match, read)
        else:
            how = "two products"
            _emit_products(match, read)
    for node in sorted(old, reverse=True):
        node.graph.erase_node(node)
    if query.op.startswith("call_") and not query.users:
        query.graph.erase_node(query)  # the `cat` of halves that are now read each by itself
    log.info("absorbed: %s: %s, for %s", name, how, sizes)
    return None


def _replace(
    node: fx.Node, emit: Callable[..., Any], read: Sequence[Reader | None], *others: fx.Node | None
) -> None:
    """Put `emit(what is read, *others)` in the place of a node, laid out in memory as that was."""

    def call(sources: Sequence[Any], *others: Any) -> Any:
        values = [None if r is None else r(source) for r, source in zip(read, sources)]
        return form.laid_out_like(tensor_of(node), emit(values, *others))

    sources = [None if r is None else r.node for r in read]
    node.replace_all_uses_with(inline(node, call, (sources, *others)))


def _emit_fused(match: Match, read: Operands) -> None:
    node = match.node

    def emit(values: Sequence[Any], mask: Any) -> Any:
        *scores, kv_c, w_uv = values
        causal = bool(argument(node, 5, "is_causal", False))
        out = form.fused_attention(_triples(scores), kv_c, w_uv, mask, _scale(match), causal, tensor_of(node))
        return out.squeeze(0) if tensor_of(node).dim() == 3 else out

    scores: list[Reader | None] = []
    for part in read.scores:
        scores += [part.query, part.w_uk, None if part.of_values else part.keys]
    _replace(node, emit, [*scores, read.kv_c, read.w_uv], argument(node, 3, "attn_mask"))


def _flat(read: Operands) -> list[Reader | None]:
    return [r for part in read.scores for r in (part.query, part.w_uk, part.keys)]


def _triples(values: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    return [(values[i], values[i + 1], values[i + 2]) for i in range(0, len(values), 3)]


def _scale(match: Match) -> float:
    scale = argument(match.node, 6, "scale")
    return float(match.keys.sizes[SUMMED] ** -0.5 if scale is None else scale)


def _emit_products(match: Match, read: Operands) -> None:
    keys, values = match.keys, match.values

    def scores(read_values: Sequence[Any]) -> Any:
        total: Any = None
        for part, (query, w_uk, met) in zip(read.scores, _triples(read_values)):
            if part.w_uk is None:
                term = torch.einsum(f"{part.query.term},{part.keys.term}->{keys.out_term}", query, met)
            else:
                first, second = form.rebracket(
                    part.query.term, part.w_uk.term, part.keys.term, keys.out_term, SUMMED
                )
                term = torch.einsum(second, torch.einsum(first, query, w_uk), met)
            total = term if total is None else total + term
        return total

    def output(read_values: Sequence[Any], weights: Any) -> Any:
        first, second = form.rebracket(
            values.weights_term, read.kv_c.term, read.w_uv.term, values.out_term, SUMMED
        )
        return torch.einsum(second, torch.einsum(first, weights, read_values[0]), read_values[1])

    _replace(keys.node, scores, _flat(read))
    _replace(values.node, output, [read.kv_c, read.w_uv], values.weights.node)
