"""Which ops a gather of rows climbs over, one by one: what `rowwise` knows."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops import matmul_by_head
from tests.passes.capture import compiled_graph, nodes_of, rows_computed

ROWS, WIDTH = 6, 4
IDS = torch.tensor([4, 1])


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
W = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))
TABLE = torch.randn(5, 3, generator=torch.Generator().manual_seed(4))
VECTOR = torch.arange(WIDTH)
E3 = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(3))

ROW_WISE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, W),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), eps=1e-6),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "add a broadcast vector": lambda x: x + VECTOR,
    "add itself": lambda x: x + x * 2,
    "silu": F.silu,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(dim=-1),
    "sum": lambda x: x.sum(dim=-1, keepdim=True),
    "mean": lambda x: x.mean(-1),
    "topk": lambda x: x.topk(2, dim=-1).values,
    "gather": lambda x: x.gather(1, (x > 0).to(torch.int64)),
    "scatter": lambda x: x.scatter(-1, (x > 0).to(torch.int64), 9.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 7.0),
    "where and masks": lambda x: torch.where((x > 0) & (x < 1) | ~(x >= -1), x, -x),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "index with None": lambda x: x[:, None],
    "index the last dimension": lambda x: x[..., 0],
    "unflatten and flatten": lambda x: x.unflatten(-1, (2, 2)).neg().flatten(1),
    "view with -1": lambda x: x.view(-1, 2, 2),
    "view with the number of rows": lambda x: x.view(ROWS, 2, 2),
    "reshape": lambda x: torch.reshape(x, (ROWS, 2, 2)),
    "split": lambda x: x.split([1, 3], dim=-1)[1],
    "chunk": lambda x: torch.chunk(x, 2, dim=-1)[0],
    "cat with itself": lambda x: torch.cat([x, x], dim=-1),
    "cat along the width": lambda x: torch.cat([x, x.neg()], dim=-1),
    "a product by head": lambda x: matmul_by_head(x.view(-1, 2, 2), E3),
    "embedding": lambda x: F.embedding((x > 0).to(torch.int64).sum(-1), TABLE),
    "cast": lambda x: x.to(torch.float64).float(),
    "sin and cos": lambda x: torch.cat([x.sin(), x.cos()], dim=-1),
    "clamp": lambda x: x.clamp(0, 1),
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_a_gather_climbs_over(name: str) -> None:
    gm = compiled_graph(lambda x, ids: torch.index_select(ROW_WISE[name](x), 0, ids), X, IDS)
    gather = nodes_of(gm, "index_select")
    assert [node.args[0].op for node in gather] == ["placeholder"], gm.graph
    carrying_rows = {rows for found in rows_computed(gm).values() for rows in found}
    assert carrying_rows == {len(IDS)}, gm.graph


X4 = torch.randn(3, 3, 4, 3, generator=torch.Generator().manual_seed(5))

ACROSS_ROWS_4D: dict[str, Callable[[Tensor], Tensor]] = {
    "lists with a slice between them": lambda x: x[:, [0, 1, 2], :, [0, 1, 2]],
    "lists behind an ellipsis": lambda x: x[..., [0, 1, 2], :, [0, 1, 2]],
    "a list and an int with a slice between them": lambda x: x[:, [0, 1, 2], :, 0],
    "a topk over rows, as numpy would name them": lambda x: torch.topk(x, 3, axis=0).values,
    "a bias of each row": lambda x: F.linear(x[:, 0, 0], torch.ones(2, 3), x[:, 1, 0, :2]),
}


@pytest.mark.parametrize("name", ACROSS_ROWS_4D)
def test_a_gather_does_not_climb_over_what_has_as_many_rows_by_accident(name: str) -> None:
    compiled_graph(
        lambda x, ids: torch.index_select(ACROSS_ROWS_4D[name](x), 0, ids), X4, torch.tensor([2, 1])
    )


def test_a_gather_of_nothing_does_not_climb_over_a_new_first_dimension() -> None:
    no_ids = torch.empty(0, dtype=torch.int64)
    gm = compiled_graph(lambda x, ids: x.unsqueeze(-3).index_select(0, ids), X[:1], no_ids)
    assert nodes_of(gm, "index_select")[0].args[0].op != "placeholder"


ACROSS_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over rows": lambda x: x.softmax(dim=0),
    "cumsum over rows": lambda x: x.cumsum(0),
    "sort of rows": lambda x: x.sort(dim=0).values,
    "a norm over the whole tensor": lambda x: F.rms_norm(x, (ROWS, WIDTH)),
    "cat along rows": lambda x: torch.cat([x, x]),
    "a transpose": lambda x: x.t(),
    "a view that mixes rows": lambda x: x.view(4, -1),
    "a product of rows with rows": lambda x: x @ x.t(),
    "a flip of rows": lambda x: x.flip(0),
    "a scatter along rows": lambda x: x.scatter(0, (x > 0).to(torch.int64), 9.0),
    "a slice of rows": lambda x: x[1:],
    "a linear of a vector": lambda x: F.linear(x[0], torch.ones(WIDTH, WIDTH).triu()),
    "a linear of x by itself": lambda x: F.linear(x, x),
    "a topk over rows": lambda x: x.topk(3, dim=0).values,
}


@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_a_gather_does_not_climb_over(name: str) -> None:
    gm = compiled_graph(
        lambda x, ids: torch.index_select(ACROSS_ROWS[name](x), 0, ids), X, torch.tensor([2, 1])
    )
    (gather,) = nodes_of(gm, "index_select")
    assert gather.args[0].op != "placeholder", gm.graph
