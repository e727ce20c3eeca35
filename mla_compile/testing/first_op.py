"""The first op of a model's graph that gives a prompt other bits beside others than alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from mla_compile.packing import pack_batch
from mla_compile.passes import pipeline
from mla_compile.passes.nodes import function_name, tensor_of
from mla_compile.passes.provenance import where
from mla_compile.speculate import ServedModel

_MOST_TOKENS = 48
"""Tokens of a prompt that are compared: enough for the tiles of most kernels to differ."""

_UNEVEN = {"logaddexp", "sigmoid", "silu", "softplus"}
"""Functions of which the last elements of a float32 tensor, too few for a vector, get other bits on some CPUs. Compiled
code does not have this; in float64, and rounded, they are alike here too."""


def first_different_op(model: ServedModel, prompts: Sequence[Sequence[int]], page_size: int) -> str:
    """Run the batch-invariant graph op by op, uncompiled: the first prompt alone and beside the others, as prompts and
    then, all but its last token cached, as rows that decode.

    model: its caches have `page_size` tokens a page and room for the prompts; what they hold is lost.
    """
    texts = [list(prompt[:_MOST_TOKENS]) for prompt in prompts]
    recorder = _Recorder()

    def forward(*given: Any) -> Tensor:
        return model.logits(model(*given).hidden)

    compiled: Callable[..., Tensor] = torch.compile(forward, backend=recorder.compile, fullgraph=True)
    columns = -(-_MOST_TOKENS // page_size)
    num_pages = model.cache_specs()[0].cache.shape[0]
    count = min(len(texts), max(1, (num_pages - 1) // columns))
    tables = 1 + torch.arange(count * columns, dtype=torch.int32, device=model.device).view(count, columns)
    for decodes, kind in ((False, "prompts"), (True, "rows that decode")):
        found = []
        for rows in (1, count):
            lens = [1] * rows if decodes else [len(text) for text in texts[:rows]]
            cached = [len(text) - n for text, n in zip(texts, lens)]
            ids = [token for text, n in zip(texts, lens) for token in text[len(text) - n :]]
            packed = pack_batch(
                lens,
                cached,
                tables[:rows],
                torch.tensor(ids, device=model.device),
                has_sampled=[decodes] * rows,
                page_size=page_size,
            )
            recorder.begin(packed.order[: lens[0]], len(packed.positions))
            with torch.no_grad():
                compiled(*packed.tensors, packed.positions, packed.batch)
            found.append(recorder.seen)
        for (node, alone), (_, beside) in zip(*found, strict=True):
            # Another dimension may be as long as the tokens are many, but not of both runs.
            if any(not torch.equal(alone[dim], beside[dim]) for dim in alone.keys() & beside.keys()):
                return f"`{node.target}` in {where(node)}, of {kind}"
    return "none by itself: look at what the compiler fuses"


class _Recorder:
    """Keeps a number for the bits of each of a prompt's rows, of each node and dimension that may be the tokens'."""

    def __init__(self) -> None:
        self.seen: list[tuple[fx.Node, dict[int, Tensor]]] = []

    def begin(self, order: Tensor, num_tokens: int) -> None:
        """order: the prompt's rows, int64 `[tokens]`, of `num_tokens`."""
        self.seen, self._order, self._num_tokens = [], order, num_tokens

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        chosen = pipeline.passes_for(gm, batch_invariant=True)
        return _Interpreter(pipeline.run(gm, example_inputs, chosen), self).run

    def see(self, node: fx.Node, value: object) -> None:
        sums = {}
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            for dim in [dim for dim, size in enumerate(value.shape) if size == self._num_tokens]:
                rows = value.movedim(dim, 0).index_select(0, self._order)
                bits = rows.contiguous().view(torch.uint8).reshape(len(rows), -1).long()
                weights = torch.arange(1, bits.shape[1] + 1, device=bits.device)
                sums[dim] = (bits * weights).sum(1).cpu()
        self.seen.append((node, sums))


class _Interpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, recorder: _Recorder) -> None:
        super().__init__(gm)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if function_name(n) in _UNEVEN and (like := tensor_of(n)).dtype == torch.float32 and like.is_cpu:
            args, kwargs = tree_map_only(Tensor, Tensor.double, self.fetch_args_kwargs_from_env(n))
            value = getattr(self, n.op)(n.target, args, kwargs).float()
        else:
            value = super().run_node(n)
        if n.op != "placeholder":
            self._recorder.see(n, value)
        return value
