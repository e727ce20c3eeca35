"""Is what two cones compute of logits a MoE layer's choice of experts? Tried on random logits, as in `recognise.py`."""

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.ops.routing import choose_experts
from mla_compile.passes.cone import Cone, shape_where_symbols_are
from mla_compile.passes.nodes import tensor_of, value_of
from mla_compile.torch_internals import is_wrapper, on_real_tensors, size_where_symbols_are

_MOST_NODES = 64
_MOST_GROUPS = 32
_TOKENS = 37
"""That are tried: so many choose otherwise, all of them, by no other rule that is tried."""


@dataclass(frozen=True)
class ExpertChoice:
    """The arguments of `choose_experts` behind the tensors, in its order."""

    topk: int
    num_groups: int
    topk_groups: int
    softmax: bool
    normalize: bool = False
    scaling: float = 1.0

    def __str__(self) -> str:
        groups = f" in {self.topk_groups} of {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.topk} experts{groups} by {'softmax' if self.softmax else 'sigmoid'}"


@dataclass(frozen=True)
class _Draw:
    """Logits, a bias, and what the cones make of them; experts in the order of their ids."""

    logits: Tensor
    bias: Tensor | None
    weights: Tensor
    ids: Tensor


def recognise_routing(weights: Cone, ids: Cone) -> ExpertChoice | str:
    """How experts are chosen of the logits that are the source of both cones, or why that is another way."""
    logits = tensor_of(weights.source)
    for cone, dtype in ((weights, torch.float32), (ids, torch.int64)):
        reason = cone.obstacle(_MOST_NODES)
        if reason is not None:
            return reason
        if not cone.nodes:
            return "it does not depend on the scores"
        if tensor_of(cone.result).dtype != dtype:
            return f"the result is {tensor_of(cone.result).dtype}"
    biases = list(dict.fromkeys([*weights.tensors, *ids.tensors]))
    if len(biases) > 1 or any(tensor_of(bias).numel() != logits.shape[-1] for bias in biases):
        return f"it reads {len(biases)} other tensors, not just a bias"
    if any(is_wrapper(tensor_of(node)) for node in (weights.source, *biases)):
        return "it reads a tensor subclass"
    try:
        with on_real_tensors(), torch.random.fork_rng(devices=[]):
            draws = [_draw(weights, ids, biases, seed, scale) for seed, scale in enumerate((1.0, 0.1, 4.0))]
            left = list(_rules(logits.shape[-1], draws[0].ids.shape[-1]))
            for draw in draws:
                left = [rule for rule in left if torch.equal(_chosen(rule, draw)[1], draw.ids)]
            if not left:
                return "it chooses otherwise"
            # Without a bias and groups the sigmoid chooses as the softmax does: weights tell them apart.
            rule = next(filter(None, (_weighed(rule, draws, _numbers(weights)) for rule in left)), None)
    except Exception as failure:  # whatever the user's operations raise
        return f"it cannot be tried: {failure}"
    return "it weighs otherwise" if rule is None else rule


def _rules(experts: int, topk: int) -> Iterator[ExpertChoice]:
    """All that may be, those with the fewest groups first."""
    for groups, softmax in itertools.product(range(1, min(experts, _MOST_GROUPS) + 1), (False, True)):
        size = experts // groups
        if experts % groups or (groups > 1 and size < 2 and not softmax):
            continue
        for kept in range(1, groups) if groups > 1 else (1,):
            if topk <= kept * size:
                yield ExpertChoice(topk, groups, kept, softmax)


def _weighed(rule: ExpertChoice, draws: list[_Draw], numbers: list[float]) -> ExpertChoice | None:
    """The rule with its weights, whose factor is one of the cone's numbers; None where they are none of it."""
    for normalize, scaling in itertools.product((False, True), numbers):
        found = ExpertChoice(rule.topk, rule.num_groups, rule.topk_groups, rule.softmax, normalize, scaling)
        if all(torch.allclose(_chosen(found, draw)[0], draw.weights, rtol=1e-5, atol=0) for draw in draws):
            return found
    return None


def _chosen(rule: ExpertChoice, draw: _Draw) -> tuple[Tensor, Tensor]:
    return _in_order(*choose_experts(draw.logits, draw.bias, *astuple(rule)))


def _in_order(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(-1)
    return weights.gather(-1, order), ids.gather(-1, order)


def _draw(weights: Cone, ids: Cone, biases: list[fx.Node], seed: int, scale: float) -> _Draw:
    generator = torch.Generator("cpu").manual_seed(seed)

    def randn(node: fx.Node, scale: float) -> Tensor:
        shape = shape_where_symbols_are(node, _TOKENS)
        return scale * torch.randn(shape, generator=generator, device="cpu")

    source = weights.source
    logits = randn(source, scale)
    values: dict[fx.Node, Any] = {source: logits}
    for leaf in dict.fromkeys([*weights.leaves, *ids.leaves]):
        if leaf in biases:
            values[leaf] = randn(leaf, 0.2).to(tensor_of(leaf).dtype)
        else:
            size = value_of(leaf)
            values[leaf] = size if isinstance(size, int | float) else size_where_symbols_are(size, _TOKENS)
    results = [cone.run({node: values[node] for node in (source, *cone.leaves)}) for cone in (weights, ids)]
    bias = values[biases[0]].flatten() if biases else None
    return _Draw(logits, bias, *_in_order(*results))


def _numbers(cone: Cone) -> list[float]:
    """1 and those that stand in the cone's calls."""
    found = [1.0]

    def look(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            found.append(float(value))
        return value

    for node in cone.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), look)
    return list(dict.fromkeys(found))
