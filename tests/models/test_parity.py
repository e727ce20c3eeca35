"""The same logits as transformers, in float32, for every option of the architecture."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mla_compile.models import MLAForCausalLM, load_model
from tests.models.small import (
    CONFIGS,
    Session,
    reference_model,
    reference_mtp_layer,
    relative_error,
    save,
)

LENGTH = 23
STEPS = {
    "one prefill": [("prefill", LENGTH)],
    "chunked prefill": [("prefill", 9), ("prefill", 1), ("prefill", 13)],
    "decode": [("prefill", 11), *[("decode", 1)] * 4, ("decode", 3), ("decode", 5)],
}


class Pair:
    """One random model, ours loaded from the checkpoint that transformers saved, and the logits it should give."""

    def __init__(self, config: PreTrainedConfig, path) -> None:
        theirs = reference_model(config)
        mtp = reference_mtp_layer(theirs)
        self.tokens = torch.randint(
            config.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(5)
        )
        self.ours = load_model(save(theirs, path, mtp))
        trunk = theirs.model(input_ids=self.tokens[:, :LENGTH])
        self.logits = theirs.lm_head(trunk.last_hidden_state)
        positions = torch.arange(LENGTH)[None]
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
        embedded = theirs.model.embed_tokens(self.tokens[:, 1:])
        drafted = mtp(
            embedded,
            trunk.last_hidden_state,
            position_embeddings=theirs.model.rotary_emb(embedded, position_ids=positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
        )
        self.mtp_logits = theirs.lm_head(drafted)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return Pair(CONFIGS[request.param], tmp_path_factory.mktemp("checkpoint"))


def run(model: MLAForCausalLM, tokens: Tensor, steps: list[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    """Logits of the trunk and of the MTP layer at every position, by those steps."""
    rows, session, done = len(tokens), Session(model, len(tokens)), 0
    trunk, drafts = [], []
    for kind, n in steps:
        if kind == "prefill":
            batch, positions = session.prefill([n] * rows, [done] * rows)
        else:
            batch, positions = session.decode([done] * rows, q_len=n)
        hidden = model(tokens[:, done : done + n].flatten(), positions, batch).hidden
        following = tokens[:, done + 1 : done + n + 1].flatten()
        drafted = model.forward_mtp(following, hidden, positions, batch)
        trunk.append(model.logits(hidden).view(rows, n, -1))
        drafts.append(model.logits(drafted).view(rows, n, -1))
        done += n
    return torch.cat(trunk, dim=1), torch.cat(drafts, dim=1)


@pytest.mark.parametrize("steps", STEPS)
def test_logits_of_the_trunk_and_the_mtp_layer_are_those_of_transformers(pair, steps, record_property):
    trunk, drafts = run(pair.ours, pair.tokens, STEPS[steps])
    errors = relative_error(trunk, pair.logits), relative_error(drafts, pair.mtp_logits)
    record_property("errors", errors)
    assert max(errors) < 1e-5
