"""What transformers itself generates, computes and drafts: the references of the integration's tests."""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel


def greedy(
    model: PreTrainedModel, prompts: list[list[int]], steps: int, **options: object
) -> list[list[int]]:
    """What greedy `generate` puts after each prompt of one left-padded batch: at most `steps` tokens.

    options: for `generate`.
    """
    ids, mask = left_padded(prompts)
    out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, **options)
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both `[prompts, longest]`."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """At every position of a text, `[tokens, vocab_size]`; one forward, no cache."""
    out: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return out


@torch.no_grad()
def drafts(model: PreTrainedModel, mtp: MtpModel, tokens: list[int], k: int) -> list[int]:
    """The k tokens that transformers' MTP layer proposes after `tokens`; the trunk has not read the last of these.

    Each comes from a run over the whole text. The layer reads a token with the hidden state before it, which behind
    `tokens` is its own.
    """
    hidden, text = hidden_states(model, tokens[:-1]), tokens[1:]
    for _ in range(k):
        out = mtp_hidden(mtp, text, hidden)
        text = [*text, int(mtp.shared_head(out[0, -1]).argmax())]
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return text[-k:]


@torch.no_grad()
def hidden_states(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The trunk's output `[1, tokens, hidden_size]`, after its final norm."""
    out: Tensor = model.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
    return out


def mtp_hidden(mtp: MtpModel, tokens: list[int], hidden: Tensor) -> Tensor:
    """The MTP layer's output `[1, tokens, hidden_size]`, after its norm; `hidden` is of the positions before."""
    embedded = mtp.embed_tokens(torch.tensor([tokens]))
    positions = torch.arange(1, len(tokens) + 1)[None]
    causal = torch.full((1, 1, len(tokens), len(tokens)), float("-inf")).triu(1)
    assert mtp.rotary_emb is not None
    out: Tensor = mtp.layers[0](
        embedded,
        hidden,
        position_embeddings=mtp.rotary_emb(embedded, position_ids=positions),
        attention_mask=causal,
        position_ids=positions,
        past_key_values=None,
    )
    return out
