"""`prefill_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

from functools import partial

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.kernels.keys import expanded_keys  # noqa: E402
from mla_compile.ops.kernels.plan import PrefillTiles  # noqa: E402
from mla_compile.ops.kernels.prefill import prefill_triton  # noqa: E402
from tests.cases import make_case  # noqa: E402
from tests.kernel_cases import prefill_args  # noqa: E402
from tests.ops.prefill_conformance import PrefillConformance, Subject, subject_of  # noqa: E402

TILES = PrefillTiles(queries=16, keys=16, warps=4, stages=1)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of("triton", run=partial(prefill_triton, tiles=TILES))


class TestTriton(PrefillConformance):
    pass


def test_keys_of_rows_may_have_zeros_between_them() -> None:
    case = make_case(prefill=[(5, 3), (7, 0), (1, 2)], rank=32, rope=16)
    _, kv_cache, w_uk, w_uv, _, cu_seqlens_k, key_slots, _ = prefill_args(case)
    arguments = kv_cache, torch.nn.functional.pad(key_slots[0], (0, 9), value=-1), cu_seqlens_k[0], w_uk, w_uv
    close, apart = expanded_keys(*arguments), expanded_keys(*arguments, gap=20)
    assert apart.cu_places.tolist() == [0, 28, 55, 78] and apart.lens.tolist() == [8, 7, 3]
    assert close.cu_places.tolist() == cu_seqlens_k[0].tolist() and close.lens.tolist() == [8, 7, 3]
    for wide, narrow in ((apart.key, close.key), (apart.value, close.value)):
        rows = zip(apart.cu_places, apart.lens)
        torch.testing.assert_close(torch.cat([wide[start : start + n] for start, n in rows]), narrow[:18])
        assert torch.count_nonzero(wide) == torch.count_nonzero(narrow)
