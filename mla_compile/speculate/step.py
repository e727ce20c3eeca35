"""One iteration of speculative decoding as one function: verify k + 1 tokens, accept, draft k, advance the state.

It reads nothing on the host and has no data-dependent shape, so `torch.compile(step, backend="mla",
mode="reduce-overhead", fullgraph=True)` turns it into a single CUDA graph. With n cached tokens, the row's last
token at position n and drafts d_1..d_k after it:

    position            n        n+1      ...   n+k
    target reads        last     d_1      ...   d_k        one forward, q_len = k + 1
    target samples      s_0      s_1      ...   s_k        s_j takes position n+j+1
    accepted            longest prefix with d_j = s_{j-1}  -> a drafts; s_0..s_a are emitted
    MTP reads           s_0,h    s_1,h    ...   s_k,h      sampled at index a -> first draft; then k - 1 more,
                                                           one position each, from its own output

The table shows the MTP drafter; `drafter.py` lists all drafters. Prompt lookup reads the text instead, in
`DecodeState.history`, which has s_0..s_a by then.

Latents of rejected positions stay in the caches and are overwritten before any token attends to them: the next step
starts at position n + a + 1, and a token attends only to positions up to its own.

A mixed step prefills prompt chunks in the same forward. A row whose prompt of p tokens ends with its chunk becomes a
decode row with p - 1 cached tokens, and only the first of its k + 1 positions is valid:

    position            p-1
    target read         the prompt's last token, in the chunk; its hidden state takes the place of the row's first
    target samples      s_0, which takes position p
    MTP reads           s_0,h    -> first draft; then k - 1 more, in one chain with all rows

If logits are NaN or infinite there is no s_j. A draft may be the cause: attention gives its latents no weight at the
positions before it, but 0 x NaN is NaN. So tokens before s_j are emitted, and the row's next step has no drafts. If a
step without drafts has no s_0, plain decoding would not have it either: the row ends.
"""

import torch
from torch import Tensor, nn

from mla_compile.batch import ForwardOutput, MLABatch
from mla_compile.defaults import MAX_DRAFTS, DrafterName
from mla_compile.errors import MLAError, check_integer
from mla_compile.ops.attention.segments import decode_segment
from mla_compile.speculate.choice import NO_TOKEN, can_choose, choose_tokens
from mla_compile.speculate.chunks import PackedChunks, PromptChunks
from mla_compile.speculate.drafter import Drafter, DrafterKind, DrafterSettings, Verified, select_drafter
from mla_compile.speculate.ngram import record
from mla_compile.speculate.state import DecodeState
from mla_compile.speculate.target import Target


class SpeculativeDecoder(nn.Module):
    """The step of a batch: an MTP iteration that advances a `DecodeState`, with prompt chunks or without.

    Args:
        model: an `nn.Module` that is a `Target`; its caches have `page_size` tokens per page.
        num_speculative_tokens: k in [0, 32]; 0 is plain decoding, one token per step. States need the same k.
        drafter: a drafter, which all steps over the same states share; or a kind, or a name in `DRAFTERS`, to build
            one. States need a `history` if it reads one.
        sampled: whether any row samples. A greedy step has no noise and no sort in its graph. Penalties are compiled in
            if the state has tensors for them.
        decode_backend: of every decode segment; see `DecodeSegment`.
    """

    model: Target

    def __init__(
        self,
        model: Target,
        num_speculative_tokens: int,
        *,
        page_size: int,
        drafter: Drafter | DrafterName | DrafterKind | None = "mtp",
        sampled: bool = False,
        decode_backend: str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.k = k = num_speculative_tokens
        check_integer("num_speculative_tokens", k, 0, MAX_DRAFTS)
        self.page_size = page_size
        self.sampled = sampled
        self.decode_backend = decode_backend
        if drafter is None or isinstance(drafter, (str, DrafterKind)):
            settings = DrafterSettings(model, self.k, page_size, decode_backend)
            kind = select_drafter(drafter, has_mtp=True)  # an engine checks this itself
            drafter = kind.build(settings) if self.k > 0 else None
        self.drafter = drafter
        self.aux_layers: tuple[int, ...] = getattr(drafter, "aux_layers", ())

    def forward(self, state: DecodeState, packed: PackedChunks | None = None) -> None:
        """Run one MTP iteration, in place; `state.report` has its result.

        packed: prompt chunks to prefill in the same forward.

        Rows with chunks must be inactive, with all tensors but `num_cached`, `last_token`, `drafts` and `report` set
        for the whole prompt. With its last chunk a row begins to decode: its report has its first token, and it gets
        drafts like the other rows. After any other chunk it stays inactive and reports nothing.

        A row that begins is a decode row with `num_cached` one less than its prompt and one valid position. The hidden
        state of that position comes from the chunk; the rest of the step treats all rows alike.
        """
        logits, output = self.verify(state, packed)
        begins = None if packed is None else packed.begins
        self.advance(state, self.choose_targets(state, logits), output, begins)

    def verify(self, state: DecodeState, packed: PackedChunks | None = None) -> tuple[Tensor, ForwardOutput]:
        """The first half of a step: run the last token and the drafts, and prompt chunks if there are any.

        Rows that begin are active afterwards.

        Returns:
            logits `[rows, k + 1, vocab_size]` of the tokens at positions `num_cached + 1 + j`, and the trunk's output
            for `[rows * (k + 1)]` tokens, for `advance`. In a row that begins, j = 0 is its first token, and the other
            positions are undefined.
        """
        # Not the decorator: Dynamo would compile its code object, which all decorated functions share.
        with torch.no_grad():
            rows = state.num_rows()
            tokens = torch.cat([state.last_token[:, None], state.drafts], dim=1)
            decode, positions = decode_segment(
                state.num_cached,
                state.block_table,
                q_len=self.k + 1,
                page_size=self.page_size,
                q_lens=self.query_lens(state),
                backend=self.decode_backend,
            )
            batch, tokens = MLABatch(decode), tokens.view(-1)
            chunks = None if packed is None else packed.chunks(state)
            if chunks is not None:
                tokens = torch.cat([tokens, chunks.token_ids])
                positions = torch.cat([positions, chunks.positions])
                batch = MLABatch(decode, chunks.segment)
            output = self._checked(self.model(tokens, positions, batch, self.aux_layers))
            if chunks is not None:
                output = self._begin_rows(state, chunks, output, positions)
            logits = self.model.logits(output.hidden)
            if logits.shape[-1] != self.model.vocab_size:
                expected = f"{logits.shape[-1]}, the number of logits of a token"
                raise MLAError("model.vocab_size", expected, self.model.vocab_size)
            return logits.view(rows, self.k + 1, -1), output

    def _checked(self, output: object) -> ForwardOutput:
        """What the forward of a model returned, perhaps a user's own; `MLAError` if it is not as `Target` says."""
        if not isinstance(output, ForwardOutput):
            got = type(output).__name__
            raise MLAError("model", "a forward that returns a ForwardOutput", got, "see docs/own-module.md")
        if len(output.aux) != len(self.aux_layers):
            expected = f"the outputs of layers {self.aux_layers} in `aux` of what the forward returns"
            raise MLAError("model", expected, f"{len(output.aux)} tensors")
        return output

    def _begin_rows(
        self, state: DecodeState, chunks: PromptChunks, output: ForwardOutput, positions: Tensor
    ) -> ForwardOutput:
        """Fill the drafter's caches with the chunks, and turn rows whose prompts end with them into decode rows.

        output, positions: of all tokens, decode rows' first, `[rows * (k + 1) + tokens, ...]`.

        Returns the output of the k + 1 positions of each row, `[rows * (k + 1), ...]`.
        """
        rows, q_len, begins = state.num_cached.shape[0], self.k + 1, chunks.last_of_row >= 0
        if self.drafter is not None:
            sizes = [rows * q_len, chunks.token_ids.shape[0]]
            self.drafter.fill(chunks, output.map(lambda hidden: torch.split(hidden, sizes)[1]))
        # k + 1 tokens of a decode row, 1 of a prompt's last chunk, 0 of any other chunk.
        gather_ids = torch.arange(rows * q_len, device=positions.device).view(rows, q_len)
        first = torch.where(begins, rows * q_len + chunks.last_of_row, gather_ids[:, 0])
        gather_ids = torch.cat([first[:, None], gather_ids[:, 1:]], dim=1).view(-1)
        output = output.map(lambda hidden: torch.index_select(hidden, 0, gather_ids))
        state.num_cached.copy_(torch.where(begins, torch.index_select(positions, 0, first), state.num_cached))
        state.active.copy_(state.active | begins)
        return output

    def choose_targets(self, state: DecodeState, logits: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Between the halves: the target's tokens, int64 `[rows, k + 1]`, from the logits of `verify`.

        A target is -1 if its logits, before penalties and masks, are NaN or infinite.

        allowed: the ids that may be chosen at each position, bool `[rows, k + 1, vocab_size]`; None for every id.
        """
        with torch.no_grad():
            rows = state.num_rows()
            for given in (logits,) if allowed is None else (logits, allowed):
                torch._check(given.shape[0] == rows)
            position = state.num_cached[:, None] + torch.arange(1, self.k + 2, device=logits.device)
            targets = choose_tokens(
                state, logits, position, state.drafts, sampled=self.sampled, allowed=allowed
            )
            return torch.where(can_choose(logits), targets, NO_TOKEN)

    def advance(
        self, state: DecodeState, targets: Tensor, output: ForwardOutput, begins: Tensor | None = None
    ) -> None:
        """The second half: accept, draft, update the state.

        targets: from `choose_targets` or chosen by the caller, int64 `[rows, k + 1]`; -1 for a missing one.
        output: from `verify`. begins: of the chunks passed to `verify`, bool `[rows]`; None for no row.
        """
        with torch.no_grad():
            rows, q_len = state.num_rows(), self.k + 1
            torch._check(targets.shape[0] == rows)
            for hidden in (output.hidden, *output.aux):
                torch._check(hidden.shape[0] == rows * q_len)
            q_lens = self.query_lens(state)
            if begins is not None:
                torch._check(begins.shape[0] == rows)
                q_lens = torch.where(begins, q_lens.clamp(max=1), q_lens)
            num_verified = (q_lens - 1).clamp(min=0)
            # Positions after the first one without a token are not valid.
            num_chosen = (targets != NO_TOKEN).to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)
            targets = targets.clamp(min=0)
            count, active = self._accept(state, targets, torch.minimum(q_lens, num_chosen))
            lacks_token = num_chosen < q_lens
            has_failed = lacks_token & (num_verified == 0)
            active = active & ~has_failed
            accepted = (count - 1).clamp(min=0)
            num_cached = state.num_cached + count
            self._count_emitted(state, targets, count)
            if state.history is not None:
                record(state.history, state.num_cached + 1, targets, count)
            state.num_drafts.copy_(torch.where(lacks_token, 0, state.max_drafts))
            if self.drafter is not None:
                q_lens = torch.where(active, q_lens, 0)
                verified = Verified(
                    self.k, self.sampled, targets, accepted, count, output, num_cached, active, q_lens
                )
                drafts = self.drafter.draft(state, verified)
                if not isinstance(drafts, Tensor):
                    raise MLAError("draft", f"int64 [rows, {self.k}] from the drafter", repr(drafts))
                if drafts.dim() != 2 or drafts.shape[1] != self.k or drafts.dtype != torch.int64:
                    got = f"{drafts.dtype} {list(drafts.shape)}"
                    raise MLAError("draft", f"int64 [rows, {self.k}] from the drafter", got)
                state.drafts.copy_(drafts)
            last_token = targets.gather(1, accepted[:, None].long())[:, 0]
            state.last_token.copy_(torch.where(count > 0, last_token, state.last_token))
            state.num_cached.copy_(num_cached)
            state.active.copy_(active)
            # A failed row emits nothing, so its `num_cached` has not changed.
            failed_at = torch.where(has_failed, num_cached + 1, 0)
            columns = torch.stack([count, active.to(torch.int32), num_verified, failed_at], dim=1)
            state.report.copy_(torch.cat([columns, targets], dim=1))

    def query_lens(self, state: DecodeState) -> Tensor:
        """The number of valid positions of a row's k + 1, int32 `[rows]`; `advance` uses 1 for a row that begins."""
        # The token at position max_len - 1 is the row's last: from there on nothing is sampled or run.
        room = state.max_len - 1 - state.num_cached
        return torch.where(state.active, torch.minimum(room.clamp(0, self.k + 1), state.num_drafts + 1), 0)

    def _count_emitted(self, state: DecodeState, tokens: Tensor, count: Tensor) -> None:
        """Count each row's first `count` `[rows]` of `tokens` `[rows, n]`, if the state has counts."""
        if state.num_emitted is not None:
            emitted = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
            rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None].expand_as(tokens)
            # Not `scatter_add_`, for which Inductor copies all counts.
            state.num_emitted.index_put_((rows, tokens), emitted.to(torch.int32), accumulate=True)

    def _accept(self, state: DecodeState, targets: Tensor, q_lens: Tensor) -> tuple[Tensor, Tensor]:
        """The number of `targets` that each row emits, int32 `[rows]`, and the rows that go on.

        q_lens: number of positions of a row that have targets.
        """
        index = torch.arange(self.k + 1, device=targets.device)
        # A draft is accepted only if its own position was run and a token can be sampled after it.
        agrees = (state.drafts == targets[:, : self.k]) & (index[1:] < q_lens[:, None])
        count = torch.minimum(1 + agrees.to(torch.int32).cumprod(dim=1).sum(dim=1), q_lens)
        stops = (targets[..., None] == state.stop_ids[:, None]).any(dim=-1) & (index < count[:, None])
        first_stop = torch.where(stops, index, self.k + 1).amin(dim=1)
        count = torch.where(state.active, torch.minimum(count, first_stop + 1), 0).to(torch.int32)
        ended = stops.any(dim=1) | (state.num_cached + count + 1 >= state.max_len)
        return count, state.active & ~ended
