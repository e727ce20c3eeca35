"""A head's config.json may say anything: a head that computes numbers comes of it, or one error that names the setting.

Its tensors are read as those of a checkpoint: `test_hostile_files.py`.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st

from mla_compile import MLABatch, MLAError, decode_segment
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM
from mla_compile.models.eagle3 import Eagle3Head, load_head
from mla_compile.models.settings import HEAD_SETTINGS, ROPE_SETTINGS, SETTINGS
from tests.models.test_hostile_configs import FOREIGN, HOSTILE, ROPE, written
from tests.models_for_tests import tiny_model
from tests.speculate.eagle3_heads import config_of, llama_config, speculators_head, weights_of, write_head

LAYER = "transformer_layer_config"
NAMES = [*SETTINGS, *HEAD_SETTINGS, *ROPE, "rope_theta", "architectures", "model_type", *FOREIGN]
KEYS = {
    "mla": [*NAMES, *(f"{table}.{name}" for table in ROPE for name in ROPE_SETTINGS)],
    "llama": [*NAMES, *(f"eagle_config.{name}" for name in ("use_aux_hidden_state", *HEAD_SETTINGS))],
    "speculators": [*NAMES, "speculators_model_type", LAYER, *(f"{LAYER}.{name}" for name in NAMES)],
}


@pytest.fixture(scope="module")
def target() -> MLAForCausalLM:
    return tiny_model(torch.float32)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: head_of(kind, tmp_path_factory.mktemp(kind)) for kind in KEYS}


def head_of(kind: str, directory: Path) -> Path:
    if kind == "speculators":
        return speculators_head(directory, "qwen3", 32, [1, 2])
    config = config_of(32, [0, 1]) if kind == "mla" else llama_config(32, [0, 1])
    return write_head(directory, config, weights_of(config))


@pytest.fixture(scope="module")
def texts(heads: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {kind: json.loads((path / "config.json").read_text()) for kind, path in heads.items()}


def assert_finite(head: Eagle3Head, target: MLAForCausalLM, count: int) -> None:
    allocate(head.cache_specs(), 3, 4)
    table, cached = torch.tensor([[2, 1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    segment, positions = decode_segment(cached, table, q_len=5, page_size=4)
    inputs = torch.arange(5)
    embedded = (head.embed_tokens or target.embed)(inputs)
    hidden = head(embedded, head.join([torch.ones(5, 32)] * count), positions, MLABatch(decode=segment))
    logits = head.logits(hidden)
    assert (
        logits[:, head.place < len(head.lm_head.weight) if head.place is not None else ...].isfinite().all()
    )


@pytest.mark.long
@runs(max_examples=400)
@given(data=st.data(), kind=st.sampled_from(list(KEYS)))
def test_a_config_gives_finite_logits_or_an_error_that_names_the_setting(
    target: MLAForCausalLM,
    heads: dict[str, Path],
    texts: dict[str, dict[str, Any]],
    data: st.DataObject,
    kind: str,
) -> None:
    keys, values = st.sampled_from(KEYS[kind]), st.sampled_from(HOSTILE)
    check_config(
        heads[kind], texts[kind], target, data.draw(st.dictionaries(keys, values, min_size=1, max_size=2))
    )


def check_config(path: Path, config: dict[str, Any], target: MLAForCausalLM, changes: dict[str, str]) -> bool:
    """Whether a head with these changes loads; else one error names a setting that has changed."""
    (path / "config.json").write_text(written(config, changes))
    start = time.process_time()
    try:
        head, layers = load_head(path, target)
    except MLAError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 2000
        assert str(path) in message
        # A size that is possible but not the tensors' own is seen by those.
        parts = [part for key in changes for part in key.split(".")]
        parts += ["the tensors of an EAGLE-3 head", "JSON object", "d2t", "eagle_aux_hidden_state_layer_ids"]
        words = message.replace("number of ", "num_").replace(" ", "_")  # some errors are transformers' own
        assert any(part in message or part in words for part in parts), message
        return False
    else:
        assert_finite(head, target, len(layers))
        return True
    finally:
        assert time.process_time() - start < 3, "no value may cost time"
