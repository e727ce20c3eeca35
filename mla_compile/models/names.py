"""Maps our tensors to their names in Hugging Face checkpoints."""

import re
from collections.abc import Container, Iterable

from torch import Tensor

from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.fp8 import SCALE_SUFFIX
from mla_compile.models.sharding import EXPERTS, Division, division

_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")


def destinations(
    model: MLAForCausalLM, checkpoint: Container[str]
) -> dict[str, tuple[Tensor, Division | None]]:
    """For each tensor name of a checkpoint, the parameter, or the part of one, that the tensor fills.

    And the tensor's `Division`, if this process reads only a part of it.

    checkpoint: its tensor names. Experts are published one by one (`mlp.experts.3.gate_proj.weight`); if it has
        `mlp.experts.gate_up_proj` instead, they are stacked, as transformers 5 has them in memory.
    """
    found: dict[str, tuple[Tensor, Division | None]] = {}
    parallel = model.parallel
    for ours, tensor in model.state_dict().items():
        how = None if parallel is None else division(ours, expert_parallel=parallel.expert_parallel)
        is_by_expert = how is not None and how.of == EXPERTS
        first = parallel.rank * len(tensor) if parallel is not None and is_by_expert else 0
        for name, place in parts(ours, tensor, model.arch.num_layers, checkpoint, first).items():
            part = how
            if how is not None and place.dim() < tensor.dim():  # one expert of a stack, or its gate or up
                part = None if is_by_expert else Division(how.dim - 1, how.of)
            found[name] = place, part
    return found


def parts(
    ours: str, tensor: Tensor, num_layers: int, checkpoint: Container[str], first_expert: int = 0
) -> dict[str, Tensor]:
    """`destinations` of one of our tensors. Scales of FP8 weights are split like the weights.

    first_expert: the first expert of a stack.
    """
    name = hugging_face_name(ours, num_layers)
    prefix, _, kind = name.rpartition(".")
    kind, scale, _ = kind.partition(SCALE_SUFFIX)
    if kind not in ("w_gate_up", "w_down"):
        return {name: tensor}
    if (stacked := f"{prefix}.{kind.removeprefix('w_')}_proj") in checkpoint:
        return {stacked + scale: tensor}
    experts = enumerate(tensor, start=first_expert)
    if kind == "w_down":
        return {f"{prefix}.{expert}.down_proj.weight{scale}": part for expert, part in experts}
    found: dict[str, Tensor] = {}
    for expert, part in experts:
        gate, up = part.chunk(2)
        found[f"{prefix}.{expert}.gate_proj.weight{scale}"] = gate
        found[f"{prefix}.{expert}.up_proj.weight{scale}"] = up
    return found


def hugging_face_name(ours: str, num_layers: int) -> str:
    """Our name of a tensor to Hugging Face's, which numbers the MTP layer as the one after the trunk's last."""
    if ours.startswith("lm_head."):
        return ours
    if not ours.startswith("mtp."):
        return f"model.{ours}"
    in_layer = ours.removeprefix("mtp.").removeprefix("layer.")
    if in_layer == "norm.weight":
        in_layer = "shared_head.norm.weight"
    return f"model.layers.{num_layers}.{in_layer}"


def shared_copies(model: MLAForCausalLM) -> dict[str, tuple[int, ...]]:
    """Names and shapes of copies that a checkpoint may have, and that the model does not read."""
    mtp_layer = f"model.layers.{model.arch.num_layers}"
    names = [f"{mtp_layer}.embed_tokens.weight", f"{mtp_layer}.shared_head.head.weight"] if model.mtp else []
    if model.lm_head is None:
        names.append("lm_head.weight")
    return dict.fromkeys(names, (model.arch.vocab_size, model.arch.hidden_size))


def num_separate_experts(model: MLAForCausalLM, checkpoint: Container[str]) -> int:
    """The number of experts that `destinations` lists one by one, over all layers."""
    num_layers = model.arch.num_layers
    stacks = [
        (hugging_face_name(ours, num_layers), tensor.shape[0])
        for ours, tensor in model.state_dict().items()
        if ours.endswith(".w_down")
    ]
    return sum(
        experts for name, experts in stacks if f"{name.removesuffix('w_down')}down_proj" not in checkpoint
    )


def layers_of(checkpoint: Iterable[str]) -> set[int]:
    """The indices of the layers that a checkpoint has tensors of."""
    return {int(match[1]) for name in checkpoint if (match := _LAYER.match(name))}


def layers_past_trunk(checkpoint: Iterable[str], num_layers: int) -> list[int]:
    """The indices of the layers after the trunk in a checkpoint: its MTP layers."""
    return sorted(number for number in layers_of(checkpoint) if number >= num_layers)
