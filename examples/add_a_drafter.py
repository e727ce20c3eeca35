"""A drafter of your own for the engine: a table of the most frequent next token.

A drafter is a class with two methods. Both are part of the compiled step, so they are tensor ops and read nothing on
the host. State between steps is in tensors; this drafter has none. Drafts never change a token: a good drafter only
reduces the number of steps.

A drafter of the library also needs an entry in `mla_compile/speculate/drafter.py` and its name in two more files:
`docs/add-a-drafter.md` lists them.

    python examples/add_a_drafter.py [--no-compile]
"""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from mla_compile import Engine, load_model, load_tokenizer
from mla_compile.batch import ForwardOutput
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.speculate import (
    DecodeState,
    DrafterKind,
    PromptChunks,
    Verified,
)


class Bigrams(nn.Module):
    """Drafts the most frequent successor of the newest token in a text, then the successor of that, and so on."""

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        super().__init__()
        follower = torch.zeros(vocab_size, dtype=torch.int64)
        for (token, successor), _ in reversed(Counter(pairwise(text)).most_common()):
            follower[token] = successor
        self.register_buffer("follower", follower)

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """Prompts need no state."""

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """k lookups in the table, from the last token of each row: int64 `[rows, k]`."""
        token = verified.targets.gather(1, verified.accepted[:, None].long())[:, 0]
        drafts = []
        for _ in range(verified.k):
            token = self.follower[token]
            drafts.append(token)
        return torch.stack(drafts, dim=1) if drafts else state.drafts[:, :0]


def main(max_new_tokens: int = 64, *, compile: bool = True) -> None:
    """Complete a prompt without drafts and with the table: the tokens are the same."""
    model, tokenizer = load_model(SHIPPED_MODEL), load_tokenizer(SHIPPED_MODEL)
    text = tokenizer(Path(torch.__file__).with_name("functional.py").read_text()[:200_000], verbose=False)
    prompt = tokenizer("def norm(x: Tensor) -> Tensor:\n")["input_ids"]
    bigrams = DrafterKind(
        "bigrams", lambda settings: Bigrams(text["input_ids"], model.vocab_size).to(model.device)
    )
    completions = []
    for k in (0, 3):
        engine = Engine(
            model,
            num_speculative_tokens=k,
            drafter=bigrams,
            max_rows=1,
            max_model_len=256,
            compile=compile,
        )
        (completion,) = engine.generate([prompt], max_new_tokens=max_new_tokens)
        print(f"{k} drafts: {completion.num_steps} steps for {len(completion.token_ids)} tokens")
        completions.append(completion.token_ids)
    assert completions[0] == completions[1], "drafts never change the tokens"


if __name__ == "__main__":
    main(compile="--no-compile" not in sys.argv)
