"""An installed vLLM (0.26) with a model of `benchmarks.random_weights`: its engine in this process, and its server.

Weights have variance 1 / fan-in: vLLM's own dummy weights are so small that all tokens choose the same experts. The
model directory has only a config.json. Without a tokenizer prompts are token ids, and answers have no text.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.random_weights import STD, Weights
from mla_compile.ops.linear.fp8 import BLOCK, DTYPE

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Of all processes, before they import anything: vLLM needs no network, and its server's engine, a process of its own,
does not inherit CUDA's state."""
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
MEMORY_SHARE = 0.1
"""What has to be free at the start; the cache's size is given, so vLLM neither profiles memory nor takes the rest."""


def version() -> str:
    import vllm

    return str(vllm.__version__)


def write_config(folder: Path, settings: dict[str, Any], weights: Weights) -> None:
    """The model directory."""
    config = settings | {"architectures": ["Glm4MoeLiteForCausalLM"], "dtype": "bfloat16"}
    config |= {"quantization_config": FP8} if weights == "fp8" else {}
    (folder / "config.json").write_text(json.dumps(config))


def cache_bytes(folder: Path, rows: int, max_len: int) -> int:
    """The cache of `rows` texts of `max_len` tokens, the MTP layer's included. folder: of `write_config`."""
    config = json.loads((folder / "config.json").read_text())
    per_token = 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * (config["num_hidden_layers"] + 1)
    return int(per_token * (rows + 1) * (max_len + 128))


def speculation(drafts: int) -> dict[str, Any] | None:
    return {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None


def patch_dummy_weights() -> None:
    """Let `load_format="dummy"` draw our weights, in any process of vLLM that loads the plugin of `server`."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda _, model, *args: draw(model)


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Fill the weights, `[out, in]` and `[experts, out, in]`, before vLLM arranges them for its kernels."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(0)
    for name, tensor in weights.items():
        of = name.removesuffix("_scale_inv")
        if tensor.dim() == 0 or not tensor.is_floating_point():
            continue  # not a weight
        if of != name:
            tensor.fill_(weights[of].shape[-1] ** -0.5 / STD)
        elif tensor.dim() == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            std = STD if tensor.dtype == DTYPE else tensor.shape[-1] ** -0.5
            std = 1.0 if "embed_tokens" in name else std
            for matrix in tensor if tensor.dim() == 3 else [tensor]:
                drawn = torch.empty(matrix.shape, device=matrix.device)
                matrix.copy_(drawn.normal_(0, std, generator=generator))


class VllmEngine:
    """vLLM's engine.

    Args:
        folder: of `write_config`.
        runner: of the model: "0" for V1, "1" for V2, None for vLLM's choice.
        sizes: numbers of rows that decode together, each captured without padding.
    """

    def __init__(
        self,
        folder: Path,
        drafts: int,
        runner: str | None,
        sizes: Sequence[int],
        max_len: int,
        step_tokens: int,
    ) -> None:
        os.environ |= {} if runner is None else {RUNNER: runner}
        import vllm

        patch_dummy_weights()
        self._sampling, self._names = vllm.SamplingParams, itertools.count()
        self._llm = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            enable_prefix_caching=False,
            gpu_memory_utilization=MEMORY_SHARE,
            kv_cache_memory_bytes=cache_bytes(folder, max(sizes), max_len),
            max_num_seqs=max(sizes),
            max_model_len=max_len,
            max_num_batched_tokens=step_tokens,
            speculative_config=speculation(drafts),
            compilation_config={
                "cudagraph_capture_sizes": sorted({n * rows for n in (1, 1 + drafts) for rows in sizes})
            },
        )

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> Iterator[list[list[int]]]:
        """Generate greedily; yields the new tokens of all rows after each step."""
        params = self._sampling(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        engine, texts = self._llm.llm_engine, {str(next(self._names)): list[int]() for _ in prompts}
        for name, prompt in zip(texts, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[output.request_id] = list(output.outputs[0].token_ids)
            yield list(texts.values())

    def routed(self, text: list[int]) -> list[Tensor]:
        """The experts that each layer chooses for a text, `[tokens, topk]`. It is longer than any captured step."""
        found: dict[int, Tensor] = {}

        def watch(is_on: bool, model: nn.Module) -> None:
            routers = (getattr(module, "router", None) for module in model.modules())
            for i, router in enumerate(each for each in routers if hasattr(each, "set_capture_fn")):
                keep = lambda ids, i=i: found.setdefault(i, ids[: len(text)].cpu())  # noqa: E731
                router.set_capture_fn(keep if is_on else None)

        self._llm.apply_model(partial(watch, True))
        list(self.run([text], 1))
        self._llm.apply_model(partial(watch, False))
        if not found:
            raise RuntimeError(f"no router ran outside of CUDA graphs for a prompt of {len(text)} tokens")
        return list(found.values())


def server(
    folder: Path, drafts: int, runner: str | None, max_rows: int, max_len: int, step_tokens: int | None
) -> tuple[list[str], dict[str, str]]:
    """The command of the OpenAI server, and its environment. folder: of `write_config`; it gets a plugin."""
    flags: dict[str, Any] = {
        "--model": folder,
        "--served-model-name": "served",
        "--load-format": "dummy",
        "--generation-config": "vllm",
        "--gpu-memory-utilization": MEMORY_SHARE,
        "--kv-cache-memory-bytes": cache_bytes(folder, max_rows, max_len),
        "--max-cudagraph-capture-size": max_rows * (1 + drafts),
        "--max-num-seqs": max_rows,
        "--max-model-len": max_len,
    }
    flags |= {"--max-num-batched-tokens": step_tokens} if step_tokens else {}
    flags |= {"--speculative-config": json.dumps(speculation(drafts))} if drafts else {}
    switches = ["--skip-tokenizer-init", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    plugin = folder / "random_weights-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: random-weights\nVersion: 0\n")
    entry = "random_weights = benchmarks.vllm_engine:patch_dummy_weights"
    (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    paths = [str(folder), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | ({} if runner is None else {RUNNER: runner})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *switches]
    command += [str(part) for flag in flags.items() for part in flag]
    return command, environment | {"PYTHONPATH": os.pathsep.join(paths)}
