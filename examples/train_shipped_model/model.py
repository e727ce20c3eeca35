"""The shipped model's shape, and the few overrides that make transformers' DeepSeek-V3 modules fast to train.

The architecture is transformers' own: `DeepseekV3ForCausalLM` for the trunk, `MtpLayer` for the drafter. Three things
are replaced for training, without a change of the result:

- every expert runs on every token as one matrix product (8 small experts: cheaper than sorting tokens by expert);
- top-k is a comparison of all pairs, which the compiler fuses (a sort of 8 numbers per token is not);
- attention picks its kernel here, because a key and a value differ in width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attention import ATTENTION, DROPOUT
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3TopkRouter

CHAIN = 3  # drafts that the MTP layer is trained to chain


def shipped_config(vocab_size: int) -> DeepseekV3Config:
    """Real latent widths (512 + 64, 16 heads), so that the checkpoint drives the GPU kernels; the rest is small."""
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=10,
        num_nextn_predict_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        intermediate_size=640,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        moe_intermediate_size=48,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rope_interleave=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        use_cache=True,
    )


def largest(x: Tensor, k: int) -> Tensor:
    """Boolean mask of the k largest of the last axis; of equal numbers the first counts as larger. x [..., n]"""
    index = torch.arange(x.shape[-1], device=x.device)
    earlier = index[None, :] < index[:, None]
    other, own = x[..., None, :], x[..., :, None]
    beaten_by = (other > own) | ((other == own) & earlier)
    return beaten_by.sum(-1) < k


def routing_weights(gate: DeepseekV3TopkRouter, tokens: Tensor) -> Tensor:
    """noaux_tc routing as a dense matrix: zero where a token skips an expert. tokens [n, hidden] -> [n, experts]"""
    with torch.autocast(tokens.device.type, enabled=False):
        scores = F.linear(tokens.float(), gate.weight.float()).sigmoid()
    choice = scores.detach() + gate.e_score_correction_bias
    groups = choice.unflatten(-1, (gate.num_group, -1))
    group_score = groups.masked_fill(~largest(groups, 2), 0).sum(-1)
    allowed = largest(group_score, gate.topk_group)[..., None].expand_as(groups).flatten(-2)
    chosen = largest(choice.masked_fill(~allowed, float("-inf")), gate.top_k)
    if gate.training:
        gate.load += chosen.sum(0).detach()
    weights = scores * chosen
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * gate.routed_scaling_factor


def dense_moe(moe: DeepseekV3MoE, hidden: Tensor) -> Tensor:
    """What `DeepseekV3MoE.forward` computes, with all experts in two matrix products."""
    tokens, experts = hidden.flatten(0, -2), moe.experts
    weights = routing_weights(moe.gate, tokens)
    gate_up = F.linear(tokens, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (experts.num_experts, -1))
    gate, up = gate_up.chunk(2, dim=-1)
    inner = (experts.act_fn(gate) * up * weights[..., None].to(up.dtype)).flatten(-2)
    routed = F.linear(inner, experts.down_proj.transpose(0, 1).flatten(1)).view_as(hidden)
    return F.dropout(routed + moe.shared_experts(hidden), DROPOUT, moe.training)


@torch.no_grad()
def initialise(modules: list[nn.Module]) -> None:
    """Every branch starts as zero, every other matrix keeps the scale of its input.

    With transformers' own initialisation (0.02 for all weights) the sum of ten branches drowns the embedding, and the
    trunk learns more slowly than one layer would. It also leaves the router and the experts of a bare `MtpLayer` at
    zero, which no gradient ever changes.
    """
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # norms
        elif name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            parameter.zero_()
        elif name.endswith(("embed_tokens.weight", "mlp.gate.weight")):
            parameter.normal_(0, 0.05 if "embed" in name else 0.02)
        else:
            parameter.normal_(0, 0.8 * parameter.shape[-1] ** -0.5)


def build(config: DeepseekV3Config) -> tuple[DeepseekV3ForCausalLM, MtpLayer]:
    """The trunk and its MTP layer, freshly initialised, with the training overrides in place."""
    trunk = DeepseekV3ForCausalLM._from_config(config, attn_implementation=ATTENTION)
    mtp = MtpModel(trunk, 1).layers[0]
    initialise([trunk, mtp])
    for module in [*trunk.modules(), *mtp.modules()]:
        if isinstance(module, DeepseekV3MoE):
            module.forward = dense_moe.__get__(module)
        if isinstance(module, DeepseekV3TopkRouter):
            module.register_buffer("load", torch.zeros(module.num_experts), persistent=False)
    return trunk, mtp


class ChainCache:
    """The key latents of one chain: those of the depths before, and one more depth at each `update`."""

    def __init__(self) -> None:
        self.latents: list[tuple[Tensor, Tensor]] = []

    def update(self, kv: Tensor, rotary: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self.latents.append((kv, rotary))
        return torch.cat([c for c, _ in self.latents], 2), torch.cat([r for _, r in self.latents], 2)


def chain_mask(length: int, depth: int, device: torch.device) -> Tensor | BlockMask | None:
    """Who sees whom at one depth of the chain, when position i of every depth continues the trunk's position i.

    As at inference, a draft sees the keys made of *true* hidden states up to i (causal), and of the keys made of its
    own chain (depths 2, 3) only those that started at i too (a diagonal for each depth).
    """
    if depth == 0:
        return None

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where(key < length, key <= query, key % length == query)

    if device.type == "cuda":
        return create_block_mask(visible, None, None, length, length * (depth + 1), device=device)
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(length * (depth + 1), device=device)[None]
    return visible(query, query, query, key)[None, None]


def mtp_chain(
    trunk: DeepseekV3ForCausalLM,
    mtp: MtpLayer,
    hidden: Tensor,
    tokens: Tensor,
    masks: list[Tensor | BlockMask | None],
) -> list[Tensor]:
    """Hidden states of each depth of the drafting chain; depth d (from 0) at i predicts token i + d + 2.

    hidden [batch, length, hidden]: the trunk's, after its final norm. tokens [batch, >= length + depths].
    """
    length, cache, states = hidden.shape[1], ChainCache(), []
    for depth, mask in enumerate(masks):
        embedded = trunk.model.embed_tokens(tokens[:, depth + 1 : depth + 1 + length])
        positions = torch.arange(depth, depth + length, device=tokens.device)[None]
        hidden = mtp(
            embedded,
            hidden,
            position_embeddings=trunk.model.rotary_emb(embedded, positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
        )
        states.append(hidden)
    return states


@torch.no_grad()
def balance(modules: list[nn.Module], rate: float) -> Tensor:
    """Auxiliary-loss-free balancing: raise the bias of underused experts. Returns the worst load over the mean."""
    worst = torch.zeros(())
    for gate in (m for m in modules if isinstance(m, DeepseekV3TopkRouter)):
        mean = gate.load.mean()
        gate.e_score_correction_bias += rate * torch.sign(mean - gate.load)
        worst = torch.maximum(worst.to(mean.device), gate.load.max() / mean.clamp(min=1))
        gate.load.zero_()
    return worst
