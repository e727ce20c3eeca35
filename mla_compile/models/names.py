"""Hugging Face's names of our tensors."""

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
    """Where the tensors of a checkpoint go: each name, with the parameter or the part of one that it fills.

    And how the tensor is divided, where this process takes only a part of it.

    checkpoint: the names that it holds. Experts are published one by one (`mlp.experts.3.gate_proj.weight`); where
        it holds `mlp.experts.gate_up_proj` instead, they are stacked, as transformers 5 has them in memory.
    """
    found: dict[str, tuple[Tensor, Division | None]] = {}
    parallel = model.parallel
    for ours, tensor in model.state_dict().items():
        how = None if parallel is None else division(ours, expert_parallel=parallel.expert_parallel)
        is_by_expert = how is not None and how.of == EXPERTS
        first = parallel.rank * len(tensor) if parallel is not None and is_by_expert else 0
        for name, place in parts(ours, tensor, model.arch.num_layers, checkpoint, first).items():
            part = how
            if how is not None and place.dim() < tensor.dim():  # one expert of a stack, gate and up apart
                part = None if is_by_expert else Division(how.dim - 1, how.of)
            found[name] = place, part
    return found


def parts(
    ours: str, tensor: Tensor, num_layers: int, checkpoint: Container[str], first_expert: int = 0
) -> dict[str, Tensor]:
    """`destinations` of one of our tensors. Scales of FP8 weights are divided as the weights are.

    first_expert: that a stack of experts begins with.
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
    """Our name of a tensor to Hugging Face's, where the MTP layer counts as the layer after the trunk's last."""
    if ours.startswith("lm_head."):
        return ours
    if not ours.startswith("mtp."):
        return f"model.{ours}"
    in_layer = ours.removeprefix("mtp.").removeprefix("layer.")
    if in_layer == "norm.weight":
        in_layer = "shared_head.norm.weight"
    return f"model.layers.{num_layers}.{in_layer}"


def shared_copies(model: MLAForCausalLM) -> dict[str, tuple[int, ...]]:
    """Names and shapes of tensors that a checkpoint may repeat and that the model takes from elsewhere."""
    mtp_layer = f"model.layers.{model.arch.num_layers}"
    names = [f"{mtp_layer}.embed_tokens.weight", f"{mtp_layer}.shared_head.head.weight"] if model.mtp else []
    if model.lm_head is None:
        names.append("lm_head.weight")
    return dict.fromkeys(names, (model.arch.vocab_size, model.arch.hidden_size))


def num_separate_experts(model: MLAForCausalLM, checkpoint: Container[str]) -> int:
    """How many experts `destinations` names one by one, all layers together."""
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
    """Numbers of the layers that a checkpoint has tensors of."""
    return {int(match[1]) for name in checkpoint if (match := _LAYER.match(name))}


def layers_past_trunk(checkpoint: Iterable[str], num_layers: int) -> list[int]:
    """Numbers of the layers that a checkpoint holds beyond the trunk's: its MTP layers."""
    return sorted(number for number in layers_of(checkpoint) if number >= num_layers)


def is_past_trunk(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to an MTP layer."""
    return bool(layers_past_trunk([name], num_layers))
