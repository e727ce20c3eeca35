"""How a prompt becomes a decode row when nothing runs beside it: by plain calls of the model, one after the other."""

import torch

from mla_compile import MLABatch, prefill_segment
from mla_compile.batch import ForwardOutput
from mla_compile.speculate import DecodeState, SpeculativeDecoder
from mla_compile.speculate.choice import choose_tokens
from mla_compile.speculate.drafter import MtpDrafter, Verified
from mla_compile.speculate.state import FIRST_TOKEN


@torch.no_grad()
def start_alone(decoder: SpeculativeDecoder, state: DecodeState, prompt: list[int]) -> None:
    """Prefill the prompt of a state's only row in one piece, sample its first token and draft behind it."""
    model, n = decoder.model, len(prompt)
    segment, positions = prefill_segment([n], [0], state.block_table, page_size=decoder.page_size)
    batch = MLABatch(prefill=segment)
    hidden = model(torch.tensor(prompt), positions, batch).hidden
    if decoder.k > 0:
        # The last token's successor is not known yet: this latent is written again.
        model.forward_mtp(torch.tensor([*prompt[1:], 0]), hidden, positions, batch)
    hidden = hidden[-1:]
    state.num_cached[0] = n
    logits = model.logits(hidden)[:, None]
    first = choose_tokens(state, logits, torch.tensor([[n]]), state.drafts[:, :0], sampled=decoder.sampled)
    # What a mixed step does with a first token, which no public call does alone.
    decoder._count_emitted(state, first, torch.ones(1, dtype=torch.int32))
    state.active[0] = bool((first != state.stop_ids).all()) and n + 1 < int(state.max_len[0])
    if isinstance(decoder.drafter, MtpDrafter):
        # As after a step in which the prompt's last token was verified alone.
        others = torch.zeros(decoder.k, dtype=torch.int64)
        output = ForwardOutput(torch.cat([hidden, hidden.new_zeros(decoder.k, hidden.shape[1])]))
        zero, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        targets = torch.cat([first[0], others])[None]
        num_cached = state.num_cached.clone()
        state.num_cached[0] = n - 1
        verified = Verified(
            decoder.k,
            decoder.sampled,
            targets,
            zero,
            one,
            output,
            num_cached,
            state.active.clone(),
            one * state.active,
        )
        state.drafts.copy_(decoder.drafter.draft(state, verified))
        state.num_cached[0] = n
    state.last_token.copy_(first[:, 0])
    state.report[:, 0], state.report[:, 1], state.report[:, FIRST_TOKEN:] = 1, state.active, first
