"""Plans an engine's memory on each GPU before anything is allocated."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from mla_compile.engine.config import EngineConfig, FittedConfig
from mla_compile.engine.device_memory import named_tensors
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.sharding import check_divisible, division
from mla_compile.ops.attention.segments import MAX_KEYS
from mla_compile.speculate.drafter import cache_specs


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each of `num_gpus` GPUs.

    weights: parameters and buffers, the drafter's own included; alike: the part of them that every GPU holds.
    cache: latents of `num_pages` pages, the dummy page included.
    steps: an estimate of the largest step's activations.
    graphs: the capture budget. The last recording may exceed it, by one step at most.
    config: the settings of the engine, with defaults filled in.
    """

    num_gpus: int
    weights: int
    alike: int
    cache: int
    steps: int
    graphs: int
    config: FittedConfig

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.steps + self.graphs

    def fits(self, usable: int) -> bool:
        """Whether it fits into GPUs of `usable` bytes, those of the reserved share not counted."""
        return self.total <= usable

    def most_pages(self, usable: int) -> int:
        """Pages of the largest cache that fits, the dummy page included; 0 or less if not even that one fits."""
        return (usable - (self.total - self.cache)) // (self.cache // self.config.num_pages)

    def most_rows(self, usable: int, num_tokens: int) -> int:
        """The number of requests of `num_tokens` tokens each that fit at once."""
        return max(0, self.most_pages(usable) - 1) // -(-num_tokens // self.config.page_size)


def plan_memory(
    model: MLAForCausalLM,
    config: EngineConfig,
    num_gpus: int = 1,
    *,
    expert_parallel: bool = False,
    argument: str = "num_gpus",
    device_type: str | None = None,
    usable: int | None = None,
) -> MemoryPlan:
    """The memory of an engine whose model is divided among GPUs (see `division`).

    model: on any device, such as the meta device (`meta_model`).
    config: without a `capture_budget` graphs count as 0 bytes.
    argument: the name of `num_gpus` in errors.
    device_type, usable: of a device to plan for: "cuda" or "cpu", and its bytes without the reserved share. By default
        the model's own device.

    Raises:
        MLAError: the model cannot be divided among this number of GPUs, or rules out a setting.
    """
    check_divisible(model, num_gpus, expert_parallel=expert_parallel, argument=argument)
    caches = {id(spec.layer.kv_cache) for spec in model.cache_specs()}
    of_model = {
        id(tensor): (name, tensor) for name, tensor in named_tensors(model) if id(tensor) not in caches
    }
    divided: list[Tensor] = []
    alike: list[Tensor] = []
    for name, tensor in of_model.values():
        how = division(name, expert_parallel=expert_parallel)
        if how is not None:
            divided.append(how.part(tensor, 0, num_gpus))
        else:
            alike.append(tensor)
    left = None if usable is None else usable - _num_bytes(divided) - _num_bytes(alike)
    fitted = config.fitted_to(model, device_type=device_type, left=left)
    drafter = fitted.build_drafter(model)
    specs = fitted.stored(cache_specs(model, drafter))
    caches |= {id(spec.layer.kv_cache) for spec in specs}
    alike += [x for _, x in named_tensors(drafter) if id(x) not in of_model and id(x) not in caches]
    return MemoryPlan(
        num_gpus=num_gpus,
        weights=_num_bytes(divided) + _num_bytes(alike),
        alike=_num_bytes(alike),
        cache=fitted.num_pages * fitted.page_size * sum(spec.bytes_per_token for spec in specs),
        steps=_of_step(model, fitted, num_gpus, len(getattr(drafter, "aux_layers", ()))),
        graphs=fitted.capture_budget or 0,
        config=fitted,
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _of_step(model: MLAForCausalLM, config: FittedConfig, num_gpus: int, num_aux: int) -> int:
    """The peak of a step with prompts: the experts' results, or the expanded keys and values."""
    arch, width = model.arch, model.embed_tokens.weight.element_size()
    tokens, heads = config.max_tokens_per_step, arch.num_heads // num_gpus
    # Before and after a layer, normed, of the drafter; what the drafter reads of each of its layers, and that joined.
    hidden = (4 + 2 * num_aux) * tokens * arch.hidden_size * width
    # One float32 vector for each expert of each token. With expert parallelism one GPU may have all of them.
    pairs = tokens * (arch.routing.topk + 1)
    experts = pairs * (4 * arch.hidden_size + width * arch.moe_intermediate_size)
    of_key = heads * (arch.qk_nope_head_dim + arch.qk_rope_head_dim + arch.v_head_dim) + arch.kv_lora_rank
    keys = min(MAX_KEYS, config.max_rows * config.max_model_len) * of_key * width
    queries = tokens * heads * (arch.qk_nope_head_dim + arch.qk_rope_head_dim + arch.v_head_dim) * width
    logits = config.max_rows * (1 + config.num_speculative_tokens) * arch.vocab_size * (width + 4)
    return hidden + max(experts, keys + queries) + logits
