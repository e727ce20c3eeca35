"""A drafter of your own: handed to the engine, or as a row of the table.

A drafter is a class with two methods that are part of the compiled step, so they are tensor ops and read nothing on the
host. This one remembers nothing and drafts each row's last token again and again: right where a text repeats itself.

To add one to the library, three files change: the class and its row go to `mla_compile/speculate/drafter.py`, its name
to `mla_compile/defaults.py` (for the command's `--drafter`), and a test of its drafts.

    python examples/add_a_drafter.py [--no-compile]
"""

import sys

from torch import Tensor, nn

from mla_compile import Engine, load_model
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.speculate import (
    DecodeState,
    DrafterKind,
    DrafterSettings,
    PromptChunks,
    Verified,
)


class Repeat(nn.Module):
    """Drafts the newest token k times."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__()
        self.k = settings.num_speculative_tokens

    def fill(self, chunks: PromptChunks, hidden: Tensor) -> None:
        """Nothing is kept of prompts."""

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """The last of each row's emitted tokens, int64 `[rows, k]`."""
        newest = verified.targets.gather(1, verified.accepted[:, None].long())
        return newest.expand(-1, self.k)


def main(max_new_tokens: int = 64, compile: bool = True) -> None:
    """Complete a prompt without drafts and with these: the tokens are the same."""
    model = load_model(SHIPPED_MODEL)
    prompt = [16] * 40  # "000...": the shipped model goes on with zeros
    completions = []
    for k in (0, 3):
        engine = Engine(
            model,
            num_speculative_tokens=k,
            drafter=DrafterKind("repeat", Repeat) if k else None,
            max_rows=1,
            max_model_len=128,
            compile=compile,
        )
        (completion,) = engine.generate([prompt], max_new_tokens=max_new_tokens)
        print(f"{k} drafts: {completion.num_steps} steps for {len(completion.token_ids)} tokens")
        completions.append(completion.token_ids)
    assert completions[0] == completions[1], "drafts never change the tokens"


if __name__ == "__main__":
    main(compile="--no-compile" not in sys.argv)
