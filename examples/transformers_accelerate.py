"""A Hugging Face model with an MTP layer, unedited, generates faster: several times on a GPU.

    python examples/transformers_accelerate.py

The model is the shipped one, which transformers loads as any DeepSeek-V3 checkpoint.
"""

import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.integrations.transformers import accelerate, restore

PROMPTS = ["And it came to pass, that", "The LORD is my"]


def timed(model: Any, inputs: Any, max_new_tokens: int) -> tuple[Tensor, float]:
    start = time.perf_counter()
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokens, time.perf_counter() - start


def main(max_new_tokens: int = 128, compile: bool = True) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # transformers reports the MTP layer's weights as unexpected; `accelerate` loads them
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    expected, stock_seconds = timed(model, inputs, max_new_tokens)
    print(f"stock       {stock_seconds:5.1f} s")
    for drafts in (0, 3):
        accelerate(model, num_speculative_tokens=drafts, max_rows=len(PROMPTS), compile=compile)
        _, first_seconds = timed(model, inputs, max_new_tokens)
        tokens, seconds = timed(model, inputs, max_new_tokens)
        equal = "same" if torch.equal(tokens, expected) else "OTHER"
        lengths = ", ".join(f"{c.acceptance_length or 1:.2f}" for c in model.mla.completions)
        print(
            f"{drafts} drafts    {seconds:5.1f} s ({first_seconds:.0f} s the first time), "
            f"{equal} tokens, {lengths} tokens a step"
        )
    restore(model)
    for text in tokenizer.batch_decode(expected, skip_special_tokens=True):
        print(f"\n{text}")


if __name__ == "__main__":
    main()
