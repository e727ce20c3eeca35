"""The collectives' kernels compiled for a GPU, and how rows are cut for them."""

import re

import pytest
import torch

from mla_compile.ops.collectives import peers as shared
from mla_compile.ops.collectives.peers import SLOT_COLUMNS, SLOTS, Peers, blocks_of, bytes_of_memory


def test_rows_are_cut_in_blocks_that_slots_hold() -> None:
    for columns in (1, 8, 100, 2048, 2049, 7168, 64_640):
        for rows in (1, 3, 64, 200, SLOTS):
            block, blocks = blocks_of(rows, columns)
            assert block <= SLOT_COLUMNS and block & (block - 1) == 0
            assert (blocks - 1) * block < columns <= blocks * block
            assert rows * blocks <= SLOTS or block == SLOT_COLUMNS, "narrow blocks only where there are slots"
    assert blocks_of(1, 7168) == (2048, 4) and blocks_of(SLOTS, 7168) == (8192, 1)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 8])
def test_the_kernels_wait_read_by_16_bytes_and_spill_nothing(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops import dependent_launch
    from mla_compile.ops.collectives.kernels import collectives
    from tests.triton_compile import compiled_for

    addresses, epochs = torch.zeros(size, dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64)
    peers = Peers(1, size, addresses, epochs, torch.empty(bytes_of_memory(size), device="meta"))
    monkeypatch.setattr(shared, "connected", lambda device: peers)
    monkeypatch.setattr(dependent_launch, "starts_early", lambda tensor: True)
    with compiled_for(90) as kernels:
        for columns in (2048, 7168):
            x = torch.empty(2, columns, dtype=torch.bfloat16)
            collectives.all_reduce_triton(x)
            collectives.all_gather_triton(x, size)
            collectives.all_reduce_add_rms_norm_triton(x, x, x[0], 1e-6)
    assert len(kernels) == 6
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel.name
        found = re.findall(r"griddepcontrol\.\w+|\b(?:ld|st|atom|red)\.global[\w.]*", kernel.text)
        assert found[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"], kernel.name
        of_peers = [name for name in found if name.startswith("ld.global.cg")]
        assert of_peers and set(of_peers) == {"ld.global.cg.v4.b32"}, kernel.name
        flags = [name for name in found if ".sys." in name]
        assert sum("release" in name for name in flags) == size - 1, kernel.name
        assert any("acquire" in name for name in flags), kernel.name
        assert "multimem" not in kernel.text
