"""Generate with the shipped model, with and without its MTP layer as drafter: the same tokens in fewer steps.

    python examples/mtp_generation.py

With k drafts, a step verifies k + 1 tokens of every row and drafts k more, all in one compiled call. Drafts change
the number of tokens a step emits, never the tokens: the target accepts only the tokens that it would choose itself.
"""

import time

import mla_compile

PROMPTS = ["In the beginning", "And the king said unto him,", "import os\n\ndef "]


def main(drafts: int = 3, max_new_tokens: int = 64, compile: bool = True) -> None:
    results = {}
    for k in (0, drafts):
        start = time.perf_counter()
        results[k] = mla_compile.generate(
            PROMPTS, num_speculative_tokens=k, max_new_tokens=max_new_tokens, compile=compile
        )
        print(f"k = {k}: {time.perf_counter() - start:.1f} s, loading and compiling included")

    for prompt, plain, drafted in zip(PROMPTS, results[0], results[drafts]):
        assert plain.token_ids == drafted.token_ids, "speculation must not change a token"
        length = drafted.acceptance_length or 1.0
        print(f"\n--- {drafted.num_steps} steps instead of {plain.num_steps}, {length:.2f} tokens each")
        print(prompt + (drafted.text or ""))


if __name__ == "__main__":
    main()
