"""`batch_invariant_matmul`: bits on the CPU, which kernel serves a call, how cuBLAS is tried (with a stand-in for it).

The kernel's results: `test_interpreted.py`; a GPU's bits: `tests/test_gpu_kernels.py`.
"""

import random
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.batch_invariant import product_by_row
from mla_compile.ops.device import H200, Device
from mla_compile.ops.library import choose
from mla_compile.ops.linear import cublas
from mla_compile.ops.linear.matmul import batch_invariant_matmul, batch_invariant_matmul_op
from mla_compile.ops.linear.tiles import ProductTiles, matmul_tiles
from tests.kernel_cases import check_matmul, drawn_matmul
from tests.ops.test_choice import fake, on

A100, B200 = Device(108, (8, 0)), Device(148, (10, 0))
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def parts(draw: random.Random, tokens: int) -> Iterator[slice]:
    for _ in range(4):
        first, last = sorted((draw.randint(0, tokens), draw.randint(0, tokens)))
        yield slice(first, last)
    yield slice(draw.randrange(tokens), None)


def elsewhere(draw: random.Random, x: Tensor) -> Tensor:
    """The same values at another offset, with the same or other strides."""
    if draw.random() < 0.3:
        return x
    shape = (*x.shape[:-1], x.shape[-1] + draw.randint(0, 20))
    first = draw.randint(0, shape[-1] - x.shape[-1])
    return x.new_full(shape, torch.nan)[..., first : first + x.shape[-1]].copy_(x)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 500), marks=pytest.mark.slow)], ids=len)
def test_a_tokens_bits_depend_on_no_other_token(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        x, w = drawn_matmul(draw, most_tokens=600, most=draw.choice([20, 100, 300]))
        whole = batch_invariant_matmul(x, w)
        check_matmul(x, w, whole)
        for part in parts(draw, len(x)):
            weights = elsewhere(draw, w) if w.stride(2) == 1 else elsewhere(draw, w.mT).mT
            got = batch_invariant_matmul(elsewhere(draw, x[part]), weights)
            assert torch.equal(got, whole[part]), (seed, part)
        order = torch.randperm(len(x))
        assert torch.equal(batch_invariant_matmul(x[order], w), whole[order]), seed


def test_a_tokens_bits_do_not_depend_on_what_the_others_hold() -> None:
    x, w = torch.randn(40, 2, 48), torch.randn(2, 48, 33)
    whole = batch_invariant_matmul(x, w)
    x[1:] = torch.nan
    assert torch.equal(batch_invariant_matmul(x, w)[0], whole[0])


@pytest.mark.parametrize(
    "shape", [(0, 1, 8, 5), (3, 0, 8, 5), (3, 2, 0, 5), (3, 2, 8, 0), (0, 0, 0, 0)], ids=str
)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_sizes_of_0(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, groups, k, n = shape
    x, w = torch.ones(tokens, groups, k, dtype=dtype), torch.ones(groups, k, n, dtype=dtype)
    out = batch_invariant_matmul(x, w)
    assert out.shape == (tokens, groups, n) and out.dtype == dtype and not out.any()


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["w", "transposed w"])
def test_opcheck(dtype: torch.dtype, transposed: bool) -> None:
    x, w = torch.randn(5, 3, 16).to(dtype), torch.randn(3, 24, 16).to(dtype).mT
    opcheck(batch_invariant_matmul_op, (x, w if transposed else w.contiguous()))
    opcheck(batch_invariant_matmul_op, (x[:, :1, :8], w[1:2, 8:]))


@pytest.mark.parametrize(
    ("name", "x", "w"),
    [
        ("x", torch.ones(3, 4), torch.ones(1, 4, 5)),
        ("w", torch.ones(3, 1, 4), torch.ones(4, 5)),
        ("w", torch.ones(3, 1, 4), torch.ones(1, 5, 5)),
        ("w", torch.ones(3, 2, 4), torch.ones(1, 4, 5)),
        ("w", torch.ones(3, 1, 4), torch.ones(1, 4, 5).double()),
        ("x", torch.ones(3, 1, 4).int(), torch.ones(1, 4, 5).int()),
        ("w", torch.ones(3, 1, 4), torch.ones(1, 4, 5, device="meta")),
        ("x", [1.0], torch.ones(1, 4, 5)),
        ("w", torch.ones(3, 1, 4), torch.ones(1, 4, 5).requires_grad_()),
    ],
    ids=str,
)
def test_bad_input_is_refused(name: str, x: Tensor, w: Tensor) -> None:
    with pytest.raises(MLAError, match=f"^{name}"):
        batch_invariant_matmul(x, w)


def test_an_unknown_number_of_tokens_adds_no_guard() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        x = torch.empty(shapes.create_unbacked_symint(), 2, 16)
        out = batch_invariant_matmul_op(x, torch.empty(2, 16, 24))
    assert out.shape[0] is x.shape[0] or out.shape[0] == x.shape[0]
    assert out.shape[1:] == (2, 24) and out.stride() == (48, 24, 1)
    assert not shapes.guards


# Which kernel serves a call.


@pytest.mark.parametrize(
    ("machine", "dtype", "bits", "expected"),
    [
        ((9, 0), torch.bfloat16, True, "by_head"),
        ((8, 0), torch.bfloat16, False, "by_head"),
        ((10, 0), torch.bfloat16, True, "cublas"),
        ((10, 0), torch.bfloat16, False, "triton"),
        ((7, 5), torch.float16, True, "cublas"),
        ((7, 5), torch.float16, False, "by_row"),
        ((9, 0), torch.float32, False, "triton"),
        ((9, 0), torch.float64, False, "by_row"),
        ("hip", torch.bfloat16, False, "by_row"),
        (None, torch.bfloat16, False, "by_row"),
    ],
    ids=str,
)
def test_which_kernel_serves_a_call(
    machine: object, dtype: torch.dtype, bits: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(machine, monkeypatch)
    monkeypatch.setattr(cublas, "has_same_bits", lambda x, w: bits)
    w = torch.empty(2, 24, 16, dtype=dtype)
    for tokens in (1, 600):
        call = fake((torch.empty(tokens, 2, 16, dtype=dtype), w.mT), machine)
        assert choose("batch_invariant_matmul", call).chosen.name == expected
    nothing = fake((torch.empty(0, 2, 16, dtype=dtype), w.mT), machine)
    assert choose("batch_invariant_matmul", nothing).chosen.name == "by_row"


@pytest.mark.parametrize(
    ("machine", "n", "dtype", "by_rows", "expected"),
    [
        ((9, 0), 2048, torch.bfloat16, True, "blocks"),
        ((8, 0), 2048, torch.float16, True, "blocks"),
        ((9, 0), 8193, torch.bfloat16, True, "cublas"),
        ((9, 0), 2048, torch.bfloat16, False, "cublas"),
        ((9, 0), 2048, torch.float32, True, "triton"),
        ((10, 0), 2048, torch.bfloat16, True, "cublas"),
    ],
    ids=str,
)
def test_which_kernel_serves_one_matrix(
    machine: object,
    n: int,
    dtype: torch.dtype,
    by_rows: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(machine, monkeypatch)
    monkeypatch.setattr(cublas, "has_same_bits", lambda x, w: x.dtype in HALF)
    w = torch.empty(1, n, 16, dtype=dtype).mT if by_rows else torch.empty(1, 16, n, dtype=dtype)
    for tokens in (1, 600):
        call = fake((torch.empty(tokens, 1, 16, dtype=dtype), w), machine)
        assert choose("batch_invariant_matmul", call).chosen.name == expected


def test_a_reason_says_that_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    on((9, 0), monkeypatch)
    monkeypatch.setattr(cublas, "has_same_bits", lambda x, w: False)
    x, w = fake((torch.empty(3, 1, 16).half(), torch.empty(1, 16, 8).half()), (9, 0))
    rejected = choose("batch_invariant_matmul", (x, w)).rejected
    assert rejected == (
        ("blocks", "supports weights one matrix, not strided"),
        ("by_head", "supports groups of 2 or more, not 1"),
        ("cublas", "supports bits in any batch equal, not different"),
    )


def test_numbers_that_are_tried_ascend() -> None:
    assert list(cublas.NUMBERS) == sorted({*cublas.NUMBERS}) and {*range(1, 34)} <= {*cublas.NUMBERS}


def test_symbolic_sizes_of_weights_are_not_tried_and_add_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "is_nvidia_gpu_here", lambda device: True)
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        n = shapes.create_unbacked_symint()
        x, w = torch.empty(4, 1, 16, dtype=torch.half), torch.empty(1, 16, n, dtype=torch.half)
        assert not cublas.has_same_bits(x, w)
    assert not shapes.guards


@pytest.mark.parametrize("strides", [(192, None, 1), (None, 192, 1), (3072, 192, 1)], ids=str)
def test_symbolic_strides_add_no_guard(
    strides: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the stride of all tokens. Transformers' queries are laid out by head; Inductor asks with those strides."""
    monkeypatch.setattr(cublas, "_as_contiguous", {})
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        n = shapes.create_unbacked_symint()
        x = torch.empty_strided(
            (n, 16, 128), [192 * n if s is None else s for s in strides], dtype=torch.half
        )
        weights = cublas.weights_of(x, torch.empty(16, 128, 64, dtype=torch.half))
        assert weights is not None
        # Private: the public call would try these strides, which a fake tensor cannot.
        cublas._as_contiguous[weights, (3072, 192)] = True
        assert cublas._takes_as_is(weights, x) == (None not in strides)
    assert not shapes.guards


# How cuBLAS is tried. On the CPU, a product whose order depends on the number of tokens stands in for it.


class Library:
    """A product that adds the halves of k separately if `splits(tokens)`, and counts its calls."""

    def __init__(self, splits: Callable[[int], bool]) -> None:
        self.splits, self.calls, self.recording = splits, 0, False

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        assert type(x) is Tensor and type(w) is Tensor, "real tensors"
        self.calls += 1
        a, b = product_by_row(x.float(), w.float()), 0.0
        if self.splits(len(x)):
            half = x.shape[2] // 2
            a = product_by_row(x[..., :half].float(), w[:, :half].float())
            b = product_by_row(x[..., half:].float(), w[:, half:].float())
        return (a + b).to(x.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library(lambda tokens: False)
    # Private: the product of cuBLAS has a stand-in, and the answers so far, cached in the process, are set aside.
    monkeypatch.setattr(cublas, "_product", made.product)
    monkeypatch.setattr(cublas, "NUMBERS", (*range(1, 20), 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 300))
    monkeypatch.setattr(cublas, "_same_bits", {})
    monkeypatch.setattr(cublas, "_as_contiguous", {})
    monkeypatch.setattr(cublas, "is_nvidia_gpu_here", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.recording)
    return made


def arguments(tokens: int, groups: int = 1, *, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, groups, 128).to(dtype), torch.randn(groups, 24, 128).to(dtype).mT


@pytest.mark.parametrize(
    ("splits", "same"),
    [
        (lambda tokens: False, True),
        (lambda tokens: True, True),
        (lambda tokens: tokens == 1, False),
        (lambda tokens: tokens < 64, False),
        (lambda tokens: tokens == 256, False),
        (lambda tokens: tokens >= 257, False),
    ],
)
def test_whether_bits_are_the_same_in_any_batch(
    splits: Callable[[int], bool], same: bool, library: Library
) -> None:
    library.splits = splits
    assert cublas.has_same_bits(*arguments(3)) == same
    calls = library.calls
    assert cublas.has_same_bits(*arguments(70)) == same and library.calls == calls, "one answer for all sizes"


@pytest.mark.parametrize("groups", [1, 3])
def test_many_tokens_are_divided(groups: int, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.splits = lambda tokens: tokens > 300
    # Private: the limit is too large for a test.
    monkeypatch.setattr(cublas, "_MAX_OUTPUT", 290 * groups * 24)
    x, w = arguments(1000, groups, dtype=torch.float16)
    whole = cublas.multiply(x, w)
    torch.testing.assert_close(whole, torch.einsum("tgk,gkn->tgn", x.float(), w.float()).half())
    for part in (slice(1), slice(5, 64), slice(700, None), slice(0), slice(100, 389), slice(3, 294)):
        got = cublas.multiply(x[part], w)
        assert torch.equal(got, whole[part]) and got.is_contiguous()


def test_nothing_is_tried_while_a_graph_is_recorded(library: Library) -> None:
    x, w = arguments(5)
    library.recording = True
    assert not cublas.has_same_bits(x, w) and not library.calls
    library.recording = False
    assert cublas.has_same_bits(x, w) and library.calls
    library.recording = True
    assert cublas.has_same_bits(x, w), "known by now"


def test_compiling_tries_with_real_tensors_and_the_callers_random_numbers_stay(library: Library) -> None:
    x, w = arguments(5)
    state = torch.get_rng_state()
    compiled = torch.compile(
        lambda x, w: batch_invariant_matmul(x, w) + 1, backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x, w)
    calls = library.calls
    assert calls > 50 and cublas.has_same_bits(x, w) and library.calls == calls, "known by now"
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("differs", [False, True])
def test_strides_of_x_that_give_other_bits_are_made_contiguous(
    differs: bool, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(40, 2, 256).half()[..., 64:192], arguments(1, 2, dtype=torch.float16)[1]
    seen = []

    def product(x: Tensor, w: Tensor) -> Tensor:
        seen.append(x.stride()[:2])
        return -library.product(x, w) if differs and x.stride(1) == 256 else library.product(x, w)

    monkeypatch.setattr(cublas, "_product", product)
    expected = cublas.multiply(x.contiguous(), w)
    cublas.has_same_bits(x, w)
    library.recording = True  # no new shape is tried
    assert torch.equal(cublas.multiply(x, w), expected)
    assert seen[-1] == ((256, 128) if differs else (512, 256))
    assert torch.equal(cublas.multiply(x.mT.contiguous().mT, w), expected)


def test_what_cublas_would_have_to_copy_is_not_tried(library: Library) -> None:
    x, w = arguments(3)
    wide = torch.randn(1, 25, 136).bfloat16()
    for weights in (w[:, 1:], wide[:, :24, 1:129].mT, w[:, ::2], w[..., :1].expand(1, 128, 9), w[..., :0]):
        assert cublas.weights_of(x[..., : weights.shape[1]], weights) is None
    assert not cublas.has_same_bits(x.float(), w.float()) and not library.calls
    for weights in (w, wide[:, 1:, 8:].mT, torch.randn(1, 128, 24).bfloat16()):
        assert cublas.has_same_bits(x, weights)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("k", [32, 512, 2048])
def test_what_is_tried_shows_its_order_in_most_elements(
    k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas, "NUMBERS", (1, 8))
    weights = cublas.Weights(torch.device("cpu"), dtype, 2, k, 16, (16 * k, 1, k))
    x, w = cublas._draw(weights)  # private: a trial does not return its inputs
    assert all(map(torch.equal, (x, w), cublas._draw(weights))) and x.shape == (8, 2, k)
    assert w.shape == (2, k, 16) and w.stride() == weights.strides

    def added(first: int, last: int) -> Tensor:
        total = torch.zeros(8, 2, 16)
        for i in range(first, last):
            total += x[..., i, None].float() * w[:, i].float()
        return total

    whole, split = added(0, k), added(0, k // 2) + added(k // 2, k)
    assert whole.isfinite().all()
    assert (whole.to(dtype) != split.to(dtype)).float().mean() > 0.6


# The tiles of the kernel, and the compiled code.

SIZES = [(tokens, n) for tokens in (1, 17, 33, 65, 129, 552, 4096) for n in (64, 2048, 5120, 10240, 154880)]


@pytest.mark.parametrize("n", [2048, 5120, 154880])
@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128, 552, 4096])
def test_programs_fill_an_h200_and_read_weights_once_for_few_tokens(tokens: int, n: int) -> None:
    tiles = matmul_tiles(tokens, n, torch.bfloat16, H200)
    assert 4 * -(-tokens // tiles.tokens) * -(-n // tiles.columns) >= 3 * H200.multiprocessors
    assert tiles.tokens >= min(tokens, 64) and tiles.tokens < 2 * max(tokens, 9)


INSTRUCTIONS = re.compile(r"mma\.sync[\w.]*?m\d+n\d+k\d+|wgmma\.mma_async[\w.]*?m64|tcgen05\.mma\b")
MMA, WGMMA, TCGEN05 = "mma.sync.aligned.m16n8k16", "wgmma.mma_async.sync.aligned.m64", "tcgen05.mma"


@pytest.mark.parametrize(
    ("device", "dtype", "instructions"),
    [
        (H200, torch.bfloat16, (MMA, WGMMA)),  # only an H200 shows that these two give the same bits
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (H200, torch.float16, (MMA, WGMMA)),
                (H200, torch.float32, ()),
                (A100, torch.bfloat16, (MMA,)),
                (A100, torch.float32, ()),
                (B200, torch.bfloat16, (TCGEN05,)),
                (Device(170, (12, 0)), torch.bfloat16, (MMA,)),
            )
        ),
    ],
    ids=str,
)
def test_all_tiles_of_a_gpu_add_along_k_by_the_same_instructions_and_fit(
    device: Device, dtype: torch.dtype, instructions: tuple[str, ...]
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.linear.kernels.matmul import matmul_triton
    from tests.triton_compile import compiled_for

    kilobytes, few = (227, 8) if device.capability[0] in (9, 10) else (99, 16)
    seen: set[str] = set()
    tiles: ProductTiles
    for tiles in sorted({matmul_tiles(*size, dtype, device) for size in SIZES}, key=str):
        x, w = torch.empty(tiles.tokens, 1, 512, dtype=dtype), torch.empty(1, 256, 512, dtype=dtype).mT
        with compiled_for(10 * device.capability[0] + device.capability[1]) as kernels:
            for split in (False, True) if dtype == torch.float32 else (False,):
                matmul_triton(x, w, tiles=tiles, split=split)
        for kernel in kernels:
            seen |= set(INSTRUCTIONS.findall(kernel.text))
            assert not re.search(r"wgmma\S*k(?!16\.)\d+\.", kernel.text)
            assert kernel.shared_memory <= kilobytes * 1024, tiles
            assert kernel.spilled_bytes <= few, tiles
    assert seen == set(instructions)
