"""`examples/train_eagle3_head`: its steps run, and its head computes what the package's head computes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mla_compile import Engine, load_model
from mla_compile.defaults import SHIPPED_MODEL
from tests.models_for_tests import tiny_model
from tests.speculate.eagle3_heads import DefinedHead, config_of, outputs_of, weights_of, write_head

FOLDER = Path(__file__).parents[2] / "examples" / "train_eagle3_head"
MODULES = ("train", "head", "corpus", "schedule")


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as `python examples/train_eagle3_head/train.py` sees it: with its own folder on the path."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield importlib.import_module("train")
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.long
def test_a_trained_head_is_one_that_the_engine_runs(train: ModuleType, tmp_path: Path) -> None:
    for name in train.SOURCES:
        (tmp_path / f"{name}.txt").write_text("In the beginning was the Word. " * 40)
    sizes = ["--texts", "4", "--length", "32", "--batch", "2", "--epochs", "1", "--vocabulary", "64"]
    train.main(["--out", str(tmp_path / "head"), "--corpus", str(tmp_path), "--threads", "1", *sizes])
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, device="cpu", mtp=False)
    engine = Engine(
        model, drafter_model=tmp_path / "head", num_speculative_tokens=2, max_model_len=64, compile=False
    )
    assert len(engine.generate([[1, 2, 3]], max_new_tokens=4, stop_ids=())[0].token_ids) == 4


@pytest.mark.parametrize("norms", [False, True], ids=["3", "3.1"])
def test_training_computes_what_drafting_does(train: ModuleType, tmp_path: Path, norms: bool) -> None:
    layers, target = [0, 1, 1], tiny_model()
    config = config_of(32, layers, fc_norm=norms, norm_output=norms)
    weights = weights_of(config)
    weights["lm_head.weight"] *= 10  # so that drafts differ
    outputs, embedding = outputs_of(target), target.embed_tokens.weight
    defined = DefinedHead(write_head(tmp_path / "head", config, weights), outputs, embedding)
    head = train.Head(config | {"draft_vocab_size": config["vocab_size"]}).double()
    head.load_state_dict(weights)
    found = set[int]()
    for seed in range(6):
        text = torch.randint(1, config["vocab_size"], (9,), generator=torch.Generator().manual_seed(seed))
        drafts = defined.drafts(text.tolist(), 3)
        both, given = torch.tensor([*text, *drafts]), outputs(text[:-1].tolist())
        aux = torch.stack([given[i] for i in layers], -2)[None]
        embedded = [embedding[both[d + 1 : d + 9]][None] for d in range(3)]
        assert [int(head.lm_head(x)[0, -1].argmax()) for x in head(aux, embedded)] == drafts
        found |= set(drafts)
    assert len(found) > 6
