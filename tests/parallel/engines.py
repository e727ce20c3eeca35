"""One of several processes; its rank 0 uses engines in unusual ways.

`python -m tests.parallel.engines RANK SIZE FOLDER CASE`, see `TestEngines`.
"""

import ctypes
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mla_compile import Engine, MLAError, Parallel, follow
from mla_compile.models import MLAForCausalLM
from mla_compile.ranks import PATIENCE
from mla_compile.testing import check_batch_invariance
from tests.parallel.worker import join, loaded
from tests.speculate.eagle3_heads import config_of, llama_config, weights_of, write_head


def several(model: MLAForCausalLM) -> None:
    """Refused and replaced engines, and numbers that no tensor holds, keep the ranks in step."""
    first = Engine(model, compile=False, max_rows=2)
    expected = first.generate([[1, 2, 3]], max_new_tokens=4)
    with pytest.raises(MLAError, match="max_tokens_per_step"):
        Engine(model, compile=False, max_rows=2, max_tokens_per_step=1)
    first.add([1, 2, 3], max_new_tokens=4, max_drafts=2**63)
    assert first.generate([[1, 2, 3]], max_new_tokens=4) == expected
    second = Engine(model, compile=False, max_rows=2)
    first.close()
    assert second.generate([[1, 2, 3]], max_new_tokens=4) == expected
    second.close()


def left_open(model: MLAForCausalLM) -> None:
    """A program that exits without `close`: the others exit soon after it."""
    assert Engine(model, compile=False).generate([[1, 2, 3]], max_new_tokens=4)


def busy(model: MLAForCausalLM) -> None:
    """Interpreters that are busy for seconds, as while they compile, do not count as lost ranks."""
    assert Engine(model, compile=False).generate([[1, 2, 3]], max_new_tokens=4)


def _be_busy() -> None:
    for _ in range(3):
        ctypes.PyDLL(None).sleep(
            5
        )  # no other thread of the interpreter runs, and the test machine is not kept busy
        time.sleep(0.1)


def invariance(model: MLAForCausalLM) -> None:
    """`check_batch_invariance`, which makes engines, and reads the caches on rank 0."""
    prompts = [[1, 5, 6, *range(7, 7 + 4 * i)] for i in range(3)]
    settings: dict[str, Any] = {"compile": False, "batch_invariant": False}
    report = check_batch_invariance(model, prompts, max_new_tokens=6, drafts=(0, 2), rounds=1, **settings)
    assert report.num_requests == 10 and report.num_tokens == 60 and report.num_latents > 0, report


def eagle3(model: MLAForCausalLM) -> None:
    """Each process loads the head, of `lm_head` its own rows; then all draft the same ids."""
    hidden, vocab = model.arch.hidden_size, model.arch.vocab_size
    prompts = [[1, 2, 3], [5, 6, 7, 8, 9]]
    plain = Engine(model, num_speculative_tokens=0, compile=False).generate(prompts, max_new_tokens=12)
    for config in (
        config_of(hidden, [0, 1], vocab_size=vocab),
        llama_config(hidden, [0, 1], vocab_size=vocab, draft_vocab_size=vocab // 2),
    ):
        with tempfile.TemporaryDirectory() as folder:
            weights = {
                name: weight.to(model.norm.weight.dtype) if weight.is_floating_point() else weight
                for name, weight in weights_of(config).items()
            }
            engine = Engine(model, drafter_model=write_head(Path(folder), config, weights), compile=False)
            drafted = engine.generate(prompts, max_new_tokens=12)
            head = engine._caches._drafter.head
            rows = weights["lm_head.weight"].chunk(2)[model.parallel.rank]
        assert engine.config.drafter.name == "eagle3" and engine.stats.num_drafts > 0
        assert torch.equal(head.lm_head.weight, rows) and head.parallel is model.parallel
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    odd = llama_config(hidden, [0, 1], vocab_size=vocab, draft_vocab_size=vocab // 2 + 1)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(MLAError, match="multiple of the number of"):
        Engine(model, drafter_model=write_head(Path(folder), odd, weights_of(odd)), compile=False)
    engine.close()


def step(model: MLAForCausalLM) -> None:
    """An error of rank 0 alone, in a step that the others have begun."""
    engine = Engine(model, compile=False)
    _fails(model, lambda: engine.generate([[1, 2, 3]], max_new_tokens=4))
    assert not engine.has_work()


def warm_up(model: MLAForCausalLM) -> None:
    """The same before anything is served."""
    engine = Engine(model, compile=False, max_rows=1)
    _fails(model, engine.warm_up)


def _fails(model: MLAForCausalLM, call: Callable[[], object]) -> None:
    with patch.object(model.layers[1], "forward", side_effect=ArithmeticError("of rank 0 alone")):
        try:
            call()
        except ArithmeticError:
            print("raised", file=sys.stderr)


def main() -> None:
    rank, size, folder, case = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    join(rank, size, folder, "cpu")
    model = loaded(Parallel.of_processes(), folder, {})
    if case == "busy":
        _be_busy()
    if rank > 0:
        follow(model)
        assert model.parallel is not None and model.parallel.ranks is not None
        before = time.perf_counter()
        model.parallel.ranks.leave()  # as at the end of the program
        assert time.perf_counter() - before < PATIENCE / 2
    else:
        globals()[case](model)


if __name__ == "__main__":
    main()
