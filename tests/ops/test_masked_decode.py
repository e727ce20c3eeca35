"""`mla_masked_decode` in plain torch: the definition, the op's contract, the errors that bad input gets."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.attention.masked_decode import masked_decode_op, mla_masked_decode
from tests.kernel_cases import MaskedCase, check_masked, masked_case

MASKED = ["none", "bool", "float", "heads"]


def run(case: MaskedCase) -> torch.Tensor:
    *tensors, scale = case.args()
    return mla_masked_decode(*tensors, softmax_scale=scale)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_op_equals_the_definition(dtype: torch.dtype, masked: str, shared: bool) -> None:
    case = masked_case([0, 1, 33, 70], masked=masked, q_len=3, shared=shared, dtype=dtype)
    check_masked(case, run(case))


def test_rows_may_share_latents_and_not_rotary_keys() -> None:
    case = masked_case([9, 70])
    check_masked(case := replace(case, kv_c=case.kv_c[:1]), run(case))
    check_masked(case := replace(case, kv_c=case.k_pe.repeat(1, 1, 2), k_pe=case.k_pe[1:]), run(case))


@pytest.mark.parametrize("shape", [(70,), (3, 70), (4, 1, 70), (2, 1, 1, 70), (4, 1, 1)])
def test_a_mask_may_broadcast(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.7
    for seen in (mask, mask.float(), mask.double()):
        check_masked(case := replace(masked_case([70, 70], q_len=3), mask=seen), run(case))


@pytest.mark.parametrize("size", ["rows", "keys"])
def test_there_may_be_no_queries_and_no_keys(size: str) -> None:
    case = masked_case([] if size == "rows" else [0, 0], keys=0 if size == "keys" else 5)
    out = run(case)
    assert out.shape == case.q_latent.shape and not out.any()


@pytest.mark.long
@pytest.mark.parametrize("masked", MASKED)
def test_the_op_keeps_its_contract(masked: str) -> None:
    opcheck(masked_decode_op, masked_case([3, 70], masked=masked, q_len=2).args())
    opcheck(masked_decode_op, masked_case([3, 70], masked=masked, shared=True, dtype=torch.bfloat16).args())


def test_sizes_may_be_unknown_and_no_guard_is_added() -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, _: list) -> Callable:
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    compiled = torch.compile(mla_masked_decode, backend=backend, fullgraph=True, dynamic=True)
    for lengths, keys in (([3, 9], 20), ([7, 1, 4], 31)):
        *tensors, scale = (case := masked_case(lengths, keys=keys)).args()
        check_masked(case, compiled(*tensors, softmax_scale=scale))
    assert len(graphs) == 1


def changed(name: str, change: Callable) -> tuple[str, Callable[[MaskedCase], MaskedCase]]:
    return name, lambda case: replace(case, **{name: change(getattr(case, name))})


BAD = {
    "queries of rank 3": changed("q_latent", lambda x: x[0]),
    "integer queries": changed("q_latent", lambda x: x.long()),
    "heads that differ": changed("q_pe", lambda x: x[:, 1:]),
    "query tokens that differ": changed("q_pe", lambda x: x[:, :, 1:]),
    "latents of other rows": changed("kv_c", lambda x: x.repeat(2, 1, 1)),
    "latents of another width": changed("kv_c", lambda x: x[..., 1:]),
    "latents of another dtype": changed("kv_c", lambda x: x.double()),
    "rotary keys of other rows": changed("k_pe", lambda x: x.repeat(2, 1, 1)),
    "fewer rotary keys": changed("k_pe", lambda x: x[:, 1:]),
    "rotary keys of another width": changed("k_pe", lambda x: x[..., 1:]),
    "a mask of integers": changed("mask", lambda x: x.long()),
    "a mask of fewer keys": changed("mask", lambda x: x[..., 1:]),
    "a mask of other heads": changed("mask", lambda x: x.expand(-1, 3, -1, -1)),
    "a mask of rank 5": changed("mask", lambda x: x[None]),
    "a mask on another device": changed("mask", lambda x: x.to("meta")),
    "a mask that is no tensor": changed("mask", lambda x: x.tolist()),
}


@pytest.mark.parametrize(("name", "change"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_by_name(name: str, change: Callable[[MaskedCase], MaskedCase]) -> None:
    with pytest.raises(MLAError, match=f"^{name}: expected .+, got "):
        run(change(masked_case([3, 70], q_len=2)))


def test_a_call_that_would_need_a_backward_is_refused() -> None:
    case = masked_case([3], masked="float")
    for name in ("kv_c", "mask"):
        needing = replace(case, **{name: getattr(case, name).clone().requires_grad_()})
        with pytest.raises(MLAError, match=rf"^{name}.+torch\.no_grad"):
            run(needing)
