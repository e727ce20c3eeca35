"""`mla-compile tune`: who is fastest at the products of models on this GPU, measured and written as a table for it.

Tuned are products by plain weights, the batch-invariant ones too. Those by FP8 weights are left to the limits in their
op's table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean

import torch
import typer
from torch import Tensor, nn

from mla_compile.cli.progress import progress
from mla_compile.errors import MLAError
from mla_compile.models.attention import MLAAttention
from mla_compile.models.checkpoint import read_config
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.layout import SIDE_BY_SIDE
from mla_compile.ops.implementations import describe_device
from mla_compile.ops.library import candidates
from mla_compile.ops.matmul import FUSED_LINEAR
from mla_compile.ops.tuned import TOKENS, VARIABLE, Line, Tuned, file_name, gpu_name

MARGIN = 1.03
"""How much longer the row may take that serves without a table, before a line names another one: less is noise."""
_WORST = 2e-2
"""The largest error of a result in bfloat16, of the largest element."""
_MOST_COPIES = 100
"""So many weights are enough, though small ones stay in the cache: a launch takes longer than to read them."""
_DTYPE = torch.bfloat16

Times = Mapping[int, Mapping[str, float]]
"""Microseconds by the number of tokens and the row's name, first of the row that serves without a table."""


@dataclass(frozen=True)
class Product:
    """A product by weights `[groups, k, n]`: of one group by `fused_linear`, or `batch_invariant_matmul`.

    by_columns: whether a column lies along memory, as in the weight of a linear layer.
    """

    op: str
    groups: int
    k: int
    n: int
    by_columns: bool = True

    @property
    def batch_invariant(self) -> bool:
        return self.op == "batch_invariant_matmul"

    def sizes(self) -> dict[str, int]:
        """The facts of the weights by which its op is tuned."""
        if self.batch_invariant:
            return {"groups": self.groups, "k": self.k, "n": self.n}
        return {"k": self.k, "columns": self.n}

    def __str__(self) -> str:
        return f"{self.op} " + ", ".join(f"{name} {size}" for name, size in self.sizes().items())

    def draw(self, device: torch.device) -> Tensor:
        """Random weights."""
        shape = (self.groups, self.n, self.k) if self.by_columns else (self.groups, self.k, self.n)
        w = torch.randn(shape, dtype=_DTYPE, device=device)
        return w.mT if self.by_columns else w

    def arguments(self, x: Tensor, w: Tensor) -> tuple[object, ...]:
        """What a row of the op's table gets, for x `[tokens, groups, k]`."""
        return (x, w) if self.batch_invariant else (x[:, 0], w[0].T, None)


def tune(directories: Sequence[Path], *, tokens: Sequence[int], output: Path | None) -> None:
    """Time the products of checkpoints, print the times, and write the table to a file.

    output: by default a file in the working directory, with the GPU's name.

    Raises:
        MLAError: no GPU that Triton kernels run on, a config that cannot be read, a file that cannot be written, a
            wrong result.
    """
    device = torch.device("cuda:0")
    gpu = gpu_name(device)
    if gpu is None:
        raise MLAError("tune", "a machine with an NVIDIA GPU", "none", "run it where models run")
    why_not = FUSED_LINEAR[0].why_not_on(*describe_device(device))
    if why_not is not None:
        raise MLAError(
            "tune", "a GPU with a choice of kernels", f"{gpu}, where that for few tokens {why_not}"
        )
    output = output or Path(file_name(gpu))
    if output.is_dir() or not output.parent.is_dir():
        raise MLAError("--output", "a file in a directory that is there", output)
    products = dict.fromkeys(product for directory in directories for product in products_of(directory))
    import triton

    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    typer.echo(f"{gpu}, {versions}: microseconds; * serves")
    lines: list[Line] = []
    for product in products:
        with progress(f"timing {product}"):
            measured = times(product, tokens, device)
        found = lines_of(product, measured)
        lines += found
        typer.echo(report(product, measured, found))
    try:
        output.write_text(Tuned(str(output), gpu, versions, tuple(lines)).dump(), encoding="utf-8")
    except OSError as error:
        raise MLAError("--output", "a file that can be written", output, str(error)) from error
    typer.echo(f"{output}: {len(lines)} lines; {VARIABLE}={output} has models served by it")


def products_of(directory: Path) -> Iterator[Product]:
    """The products of a checkpoint's model, by its config alone; FP8 weights count as plain ones.

    Two weights that the loader lays side by side are one product. Their batch-invariant products stay untuned: they are
    joined only where one row serves both.
    """
    config, _ = read_config(directory)
    with torch.device("meta"):
        model = MLAForCausalLM(config, mtp=bool(getattr(config, "num_nextn_predict_layers", 0)))
    for module in model.modules():
        if isinstance(module, MLAAttention):
            for w in module.up_projections():
                groups, k, n = w.shape
                yield Product("batch_invariant_matmul", groups, k, n, by_columns=w.stride(1) == 1)
        sizes = {
            name: (layer.in_features, layer.out_features)
            for name, layer in module.named_children()
            if type(layer) is nn.Linear and name != "kv_b_proj"  # which are the up-projections
        }
        for first, second in SIDE_BY_SIDE:
            if {first, second} <= sizes.keys():
                (k, n), (_, more) = sizes.pop(first), sizes.pop(second)
                yield Product("fused_linear", 1, k, n + more)
        for k, n in sizes.values():
            yield from _both_modes(k, n)
    yield from _both_modes(config.hidden_size, config.vocab_size)  # the head, which may be the embedding


def _both_modes(k: int, n: int) -> Iterator[Product]:
    yield Product("fused_linear", 1, k, n)
    yield Product("batch_invariant_matmul", 1, k, n)


def times(product: Product, tokens: Sequence[int], device: torch.device) -> Times:
    """What each row that may serve takes, in a replayed graph, with weights that are not in the cache.

    Raises:
        MLAError: a row whose result is wrong.
    """
    from triton.testing import do_bench_cudagraph

    first = product.draw(device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    copies = min(max(1, 2 * cache // first.nbytes), _MOST_COPIES)
    weights = [first, *(product.draw(device) for _ in range(copies))]
    found: dict[int, dict[str, float]] = {}
    for count in tokens:
        x = torch.randn(count, product.groups, product.k, dtype=_DTYPE, device=device) / product.k**0.5
        calls = [product.arguments(x, w) for w in weights]
        expected = torch.einsum("tgk,gkn->tgn", x.float(), first.float())
        found[count] = {}
        for row in candidates(product.op, calls[0]):
            run = partial(_run_all, row.load(), calls)
            _check(f"{product}, {count} tokens, by {row.name}", run()[0], expected)
            found[count][row.name] = 1e3 * do_bench_cudagraph(run, return_mode="min") / len(weights)
    return found


def _run_all(function: Callable[..., Tensor], calls: Sequence[tuple[object, ...]]) -> list[Tensor]:
    return [function(*args) for args in calls]


def _check(name: str, out: Tensor, expected: Tensor) -> None:
    error = (out.reshape(expected.shape) - expected).abs().max() / expected.abs().max()
    if not error < _WORST:
        at_most = f"an error of at most {_WORST} of the largest element"
        raise MLAError(name, at_most, f"{error:.1e}", "report it as a bug")


def lines_of(product: Product, measured: Times) -> list[Line]:
    """The lines by which a product is served as fast as it was seen to be; none where it is so without.

    A number of tokens that lies between two that were measured is served as the greater one. A batch-invariant product
    has one row for all numbers: the one with the least product of times.
    """
    takes = {name: range(size, size + 1) for name, size in product.sizes().items()}
    numbers = sorted(measured)
    if product.batch_invariant:
        everywhere = [row for row in measured[numbers[0]] if all(row in us for us in measured.values())]
        winner = _winner({row: geometric_mean(measured[n][row] for n in numbers) for row in everywhere})
        return [] if winner is None else [Line(product.op, True, takes, winner)]
    found: list[Line] = []
    start = numbers[0]
    for winner, group in groupby(numbers, key=lambda n: _winner(measured[n])):
        end = [*group][-1] + 1
        if winner is not None:
            found.append(Line(product.op, False, takes | {TOKENS: range(start, end)}, winner))
        start = end
    return found


def _winner(us: Mapping[str, float]) -> str | None:
    """The fastest row; None where the first one, which serves without a table, is as fast."""
    fastest = min(us, key=lambda name: us[name])
    return fastest if us[next(iter(us))] > MARGIN * us[fastest] else None


def report(product: Product, measured: Times, lines: Sequence[Line]) -> str:
    """The times of a product, a line for each number of tokens."""
    said = [str(product)]
    for count, us in measured.items():
        named = [line.row for line in lines if count in line.takes.get(TOKENS, range(count, count + 1))]
        serves = next(iter(named or us))
        cells = [f"{name}{'*' if name == serves else ''} {each:.1f}" for name, each in us.items()]
        said.append(f"  {count:>5} tokens  " + "  ".join(cells))
    return "\n".join(said)
