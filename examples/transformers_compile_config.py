"""Stock `generate` of Hugging Face transformers with its static cache: only the compile backend changes.

    python examples/transformers_compile_config.py

The cache holds latents, which transformers expands to keys and values of its full length in every step. The pass
`absorb_mla` recognises that in the graph and attends to the latents instead. The longer the cache, the more it saves.
"""

import time

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig
from transformers.utils import logging

from mla_compile.defaults import SHIPPED_MODEL

PROMPT = "And it came to pass, that"


def compile_config(backend: str) -> CompileConfig:
    config = CompileConfig(backend=backend, mode="reduce-overhead", fullgraph=True)
    config._compile_all_devices = (
        True  # transformers leaves a model on the CPU uncompiled otherwise; no need on a GPU
    )
    return config


def main(
    cache_len: int = 1024, max_new_tokens: int = 48, backends: tuple[str, ...] = ("inductor", "mla")
) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")

    def generate(backend: str, new_tokens: int) -> tuple[Tensor, float]:
        start = time.perf_counter()
        tokens = model.generate(
            **inputs,
            max_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation="static",
            max_cache_len=cache_len,
            compile_config=compile_config(backend),
        )
        return tokens, time.perf_counter() - start

    expected = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    for backend in backends:
        torch.compiler.reset()
        _, first = generate(backend, max_new_tokens)
        tokens, seconds = generate(backend, max_new_tokens)
        _, prompt_seconds = generate(backend, 2)
        per_step = (seconds - prompt_seconds) / (max_new_tokens - 2) * 1e3
        equal = "same" if torch.equal(tokens, expected) else "OTHER"
        print(f"{backend:9} {per_step:6.1f} ms a step ({first:.0f} s the first time), {equal} tokens")
    print(f"\n{tokenizer.decode(expected[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
