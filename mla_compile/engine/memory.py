"""What an engine takes of each GPU's memory, known before anything is allocated."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from mla_compile.engine.config import EngineConfig, FittedConfig
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.sharding import check_divisible, division
from mla_compile.ops.attention.segments import MAX_KEYS
from mla_compile.speculate.drafter import cache_specs

RESERVED = 0.05
"""The share of a GPU's memory that is left to CUDA itself, the code of kernels, collectives' buffers and gaps."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each of `num_gpus` GPUs.

    weights: parameters and buffers, the drafter's own too; alike: those of them that every GPU has.
    cache: latents of `num_pages` pages, the dummy page included.
    steps: an estimate of what the largest step computes with.
    graphs: what recordings may hold before no further one is begun. The last one may pass it, by a step at most.
    """

    num_gpus: int
    weights: int
    alike: int
    cache: int
    num_pages: int
    page_size: int
    steps: int
    graphs: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.steps + self.graphs

    def fits(self, memory: int) -> bool:
        """Into GPUs of so many bytes, of which a share is reserved."""
        return self.total <= available(memory)

    def most_pages(self, memory: int) -> int:
        """Of a cache that fits beside all else, the dummy page included; 0 or fewer: not even that one."""
        return (available(memory) - (self.total - self.cache)) // (self.cache // self.num_pages)

    def most_rows(self, memory: int, num_tokens: int) -> int:
        """How many requests of so many tokens each have room at once."""
        return max(0, self.most_pages(memory) - 1) // -(-num_tokens // self.page_size)


def available(memory: int) -> int:
    """What may be planned of a GPU's bytes."""
    return int(memory * (1 - RESERVED))


def plan_memory(
    model: MLAForCausalLM,
    config: EngineConfig,
    num_gpus: int = 1,
    *,
    expert_parallel: bool = False,
    argument: str = "num_gpus",
) -> MemoryPlan:
    """The memory of an engine whose model is divided among GPUs (see `division`).

    model: on any device, the meta device say (`meta_model`).
    config: without a `capture_budget` no bytes of graphs are counted.
    argument: what `num_gpus` is called in an error.

    Raises:
        MLAError: a number of GPUs that the model cannot be divided among, a setting that the model rules out.
    """
    check_divisible(model, num_gpus, expert_parallel=expert_parallel, argument=argument)
    fitted = config.fitted_to(model)
    drafter = fitted.build_drafter(model)
    specs = cache_specs(model, drafter)
    caches = {id(spec.layer.kv_cache) for spec in [*model.cache_specs(), *specs]}
    of_model = {id(tensor) for _, tensor in _named_tensors(model)}
    divided: list[Tensor] = []
    alike = [x for _, x in _named_tensors(drafter) if id(x) not in of_model and id(x) not in caches]
    for name, tensor in _named_tensors(model):
        if id(tensor) in caches:
            continue
        how = division(name, expert_parallel=expert_parallel)
        if how is not None:
            divided.append(how.part(tensor, 0, num_gpus))
        else:
            alike.append(tensor)
    return MemoryPlan(
        num_gpus=num_gpus,
        weights=_num_bytes(divided) + _num_bytes(alike),
        alike=_num_bytes(alike),
        cache=fitted.num_pages * fitted.page_size * sum(spec.bytes_per_token for spec in specs),
        num_pages=fitted.num_pages,
        page_size=fitted.page_size,
        steps=_of_step(model, fitted, num_gpus),
        graphs=fitted.capture_budget or 0,
    )


def _named_tensors(module: object) -> list[tuple[str, Tensor]]:
    """Parameters and buffers; none of a drafter that is no module."""
    if not isinstance(module, nn.Module):
        return []
    return [*module.named_parameters(), *module.named_buffers()]


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _of_step(model: MLAForCausalLM, config: FittedConfig, num_gpus: int) -> int:
    """The most that is alive at once in a step with prompts: experts' results, or expanded keys and values."""
    arch, width = model.arch, model.embed_tokens.weight.element_size()
    tokens, heads = config.max_tokens_per_step, arch.num_heads // num_gpus
    hidden = 4 * tokens * arch.hidden_size * width  # before and behind a layer, normed, of the drafter
    # Each token's experts give a row in float32. Where experts are divided by whole ones, one GPU may have all of them.
    pairs = tokens * (arch.routing.topk + 1)
    experts = pairs * (4 * arch.hidden_size + width * arch.moe_intermediate_size)
    of_key = heads * (arch.qk_nope_head_dim + arch.qk_rope_head_dim + arch.v_head_dim) + arch.kv_lora_rank
    keys = min(MAX_KEYS, config.max_rows * config.max_model_len) * of_key * width
    queries = tokens * heads * (arch.qk_nope_head_dim + arch.qk_rope_head_dim + arch.v_head_dim) * width
    logits = config.max_rows * (1 + config.num_speculative_tokens) * arch.vocab_size * (width + 4)
    return hidden + max(experts, keys + queries) + logits
