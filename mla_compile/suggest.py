"""Suggestions for an unknown name: our name for another program's word, else a close spelling."""

from collections.abc import Collection
from difflib import get_close_matches

_CLOSE = 0.75
"""difflib's ratio. Its default of 0.6 finds --tokenizer close to --max-tokens."""

_ELSEWHERE = {
    "--api-key-file": "api-key",
    "--batch-invariant": "deterministic enable-deterministic-inference",
    "--capture-budget": "cuda-graph-sizes cudagraph-capture-sizes cuda-graph-max-bs",
    "--chat-template": "chat-template-file",
    "--decode-backend": "attention-backend",
    "--device": "gpu main-gpu device-id",
    "--drafter": "speculative-config speculative-algorithm speculative-model model-draft spec-type",
    "--dtype": "torch-dtype precision data-type",
    "--expert-parallel": "enable-expert-parallel ep ep-size expert-parallel-size",
    "--gpu-memory": "gpu-memory-utilization mem-fraction-static",
    "--gpus": "tensor-parallel-size tensor-parallel tp tp-size num-gpus n-gpus",
    "--grammar": "guided-grammar grammar-file",
    "--input": "input-file prompt-file file dataset prompts f",
    "--json-schema": "guided-json response-format schema j",
    "--logprobs": "top-logprobs n-probs",
    "--max-model-len": "ctx-size c max-seq-len max-seq-length context-length max-length",
    "--max-new-tokens": "max-tokens max-completion-tokens max-output-tokens n-predict predict max-length",
    "--max-rows": "max-num-seqs max-batch-size batch-size max-running-requests parallel np max-concurrency",
    "--max-tokens-per-step": "max-num-batched-tokens chunked-prefill-size max-prefill-tokens ubatch-size ub",
    "--max-waiting": "max-queued-requests max-queue-size",
    "--model": "model-path model-id model-dir model-name-or-path checkpoint pretrained m hf-repo",
    "--n": "num-return-sequences best-of num-samples",
    "--no-compile": "enforce-eager eager disable-cuda-graph",
    "--no-prefix-caching": "no-enable-prefix-caching disable-radix-cache no-cache-prompt",
    "--num-pages": "num-gpu-blocks-override num-gpu-blocks gpu-memory-utilization mem-fraction-static max-total-tokens",
    "--num-speculative-tokens": "draft draft-max draft-n speculative-num-draft-tokens speculative-num-steps",
    "--output": "output-file out o",
    "--page-size": "block-size",
    "--prefix-caching": "enable-prefix-caching cache-prompt",
    "--prompt": "text p message",
    "--quantize": "quantization",
    "--regex": "guided-regex pattern",
    "--repetition-penalty": "repeat-penalty",
    "--replicas": "data-parallel-size dp dp-size num-replicas",
    "--request-timeout": "timeout",
    "--rows": "batch-size max-rows max-num-seqs",
    "--seed": "random-seed s",
    "--served-model-name": "alias model-alias model-name",
    "--shutdown-timeout": "timeout-graceful-shutdown",
    "--stop": "stop-strings stop-sequences reverse-prompt r",
    "--temperature": "temp t",
    "--tensor-parallel-size": "tensor-parallel tp tp-size gpus num-gpus n-gpus nproc-per-node",
    "--tokenizer": "tokenizer-path tokenizer-dir",
    "MODEL_DIR": "model model-path",
    "env": "info version doctor collect-env check",
    "generate": "run chat cli complete completion infer run-batch",
    "serve": "server api-server start",
}
"""The names that vLLM, SGLang, llama.cpp, transformers and OpenAI's API have for our flags and commands."""


def suggestions(name: str, here: Collection[str]) -> list[str]:
    """The names in `here` that a user may have meant by `name`, the likeliest first; empty if none is similar."""
    words = {each.lstrip("-").lower(): each for each in here}
    word = name.lstrip("-").lower().replace("_", "-")
    if word in words:
        return [words[word]]
    return (
        [each for each in here if word in _ELSEWHERE.get(each, "").split()]
        or [each for spelling, each in words.items() if len(word) > 2 and spelling.startswith(word)]
        or [words[close] for close in get_close_matches(word, words, cutoff=_CLOSE)]
    )


def did_you_mean(name: str, here: Collection[str]) -> str:
    """A sentence to append to an error, or an empty string."""
    found = suggestions(name, here)
    return f". Did you mean {' or '.join(found)}?" if found else ""
