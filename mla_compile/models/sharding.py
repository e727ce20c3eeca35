"""Divides a model's tensors among GPUs, by a table of their names.

Attention is divided by heads, MLPs and experts by their intermediate width (or by whole experts), embedding and head by
the vocabulary. Every GPU has all of the rest: norms, routers, the projections to latents, and the cache.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from mla_compile.errors import MLAError
from mla_compile.models.attention import MLAAttention
from mla_compile.models.decoder import DecoderLayer
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.fp8 import SCALE_SUFFIX
from mla_compile.models.moe import MoE
from mla_compile.models.parallel import Parallel
from mla_compile.ops.linear.fp8 import BLOCK, DTYPE

VOCABULARY = "vocab_size"
HEADS = "num_attention_heads"
INTERMEDIATE = "intermediate_size"
EXPERTS = "n_routed_experts"
EXPERT_INTERMEDIATE = "moe_intermediate_size"
SHARED_INTERMEDIATE = "n_shared_experts * moe_intermediate_size"


@dataclass(frozen=True)
class Division:
    """A tensor is cut along `dim`; if it stacks several matrices along it, such as gate and up, each of them is cut.

    of: the config's setting that is divided. Each GPU gets a whole number of its units.
    """

    dim: int
    of: str
    stacked: int = 1

    def ranges(self, width: int, rank: int, size: int) -> list[tuple[int, int]]:
        """The begin and end of the GPU's part along `dim`, which has size `width`, for each stacked matrix."""
        each = width // self.stacked
        edges = each * rank // size, each * (rank + 1) // size
        return [(stack * each + edges[0], stack * each + edges[1]) for stack in range(self.stacked)]

    def part(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """The part of a divisible tensor on GPU `rank` of `size`; a view of it if nothing is stacked."""
        pieces = tensor.unflatten(self.dim, (self.stacked, size, -1))
        part: Tensor = pieces.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1)
        return part


def _mlp(parent: str, of: str) -> dict[str, Division]:
    up, down = Division(0, of), Division(1, of)
    return {f"{parent}.gate_proj": up, f"{parent}.up_proj": up, f"{parent}.down_proj": down}


_DIVIDED = {
    "embed_tokens": Division(0, VOCABULARY),
    "lm_head": Division(0, VOCABULARY),
    "self_attn.q_proj": Division(0, HEADS),
    "self_attn.q_b_proj": Division(0, HEADS),
    "self_attn.kv_b_proj": Division(0, HEADS),
    "self_attn.o_proj": Division(1, HEADS),
    **_mlp("mlp", INTERMEDIATE),
    **_mlp("shared_experts", SHARED_INTERMEDIATE),
    "experts.w_gate_up": Division(1, EXPERT_INTERMEDIATE, stacked=2),
    "experts.w_down": Division(2, EXPERT_INTERMEDIATE),
}
"""By the last two components of a tensor's name, without "weight"."""
_BY_EXPERT = {name: Division(0, EXPERTS) for name in _DIVIDED if name.startswith("experts.")}


def division(name: str, *, expert_parallel: bool) -> Division | None:
    """The `Division` of a parameter or buffer of `MLAForCausalLM`; None: every GPU has all of it.

    name: the model's own name. Scales of FP8 weights are divided like the weights.

    expert_parallel: each GPU has whole routed experts, not a part of each one's intermediate width.
    """
    words = name.removesuffix(SCALE_SUFFIX).removesuffix(".weight").split(".")
    table = _DIVIDED | _BY_EXPERT if expert_parallel else _DIVIDED
    return table.get(".".join(words[-2:]))


def divide(model: MLAForCausalLM, parallel: Parallel) -> None:
    """Reduce a model to a process's part: its part of each divided parameter and of the work.

    model: with complete parameters, such as on the meta device; it must be divisible (`check_divisible`).
    """
    size = parallel.size
    for name, parameter in model.named_parameters():
        how = division(name, expert_parallel=parallel.expert_parallel)
        if how is not None:
            parameter.data = how.part(parameter.data, parallel.rank, size).contiguous()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = module.weight.shape[0]
        elif isinstance(module, MLAAttention):
            module.num_heads //= size
        elif isinstance(module, DecoderLayer):
            module.is_divided = True
        elif isinstance(module, MoE) and parallel.expert_parallel:
            each = model.arch.routing.num_experts // size
            module.own_experts = range(each * parallel.rank, each * (parallel.rank + 1))
    model.parallel = parallel


def numbers_of_gpus(model: MLAForCausalLM, *, expert_parallel: bool) -> list[int]:
    """The numbers of GPUs that a model can be divided among, ascending."""
    most = math.gcd(*_limits(model, expert_parallel=expert_parallel).values())
    return [size for size in range(1, most + 1) if most % size == 0]


def check_divisible(
    model: MLAForCausalLM, size: int, *, expert_parallel: bool, argument: str = "size"
) -> None:
    """Raises `MLAError` if a model cannot be divided among `size` GPUs, with the numbers that work.

    argument: the name of `size` in the error.
    """
    limits = _limits(model, expert_parallel=expert_parallel)
    against = [words for words, number in limits.items() if size < 1 or number % size]
    if against:
        numbers = ", ".join(map(str, numbers_of_gpus(model, expert_parallel=expert_parallel)))
        raise MLAError(argument, f"one of {numbers}", size, f"it does not divide {'; '.join(against)}")


def _limits(model: MLAForCausalLM, *, expert_parallel: bool) -> dict[str, int]:
    """Counts that the number of GPUs must divide, by a description: settings first, then FP8 blocks."""
    arch = model.arch
    counts = {
        VOCABULARY: arch.vocab_size,
        HEADS: arch.num_heads,
        INTERMEDIATE: arch.intermediate_size,
        EXPERTS: arch.routing.num_experts,
        EXPERT_INTERMEDIATE: arch.moe_intermediate_size,
        SHARED_INTERMEDIATE: arch.num_shared_experts * arch.moe_intermediate_size,
    }
    settings: dict[str, int] = {}
    blocks: dict[str, int] = {}
    for name, tensor in model.named_parameters():
        how = division(name, expert_parallel=expert_parallel)
        if how is not None:
            settings[f"{how.of} = {counts[how.of]}"] = counts[how.of]
            if tensor.dtype == DTYPE and how.of != EXPERTS:
                width = tensor.shape[how.dim] // how.stacked
                if width % BLOCK:  # a block cannot be cut, so only one GPU works
                    blocks[f"{how.of} in FP8, as {width} is not a multiple of {BLOCK}"] = 1
                else:
                    blocks[f"{width // BLOCK} FP8 blocks of {how.of}"] = width // BLOCK
    return settings | blocks
