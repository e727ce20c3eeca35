"""Attention and experts that replace transformers' own while an accelerated model generates."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.activations import SiLUActivation

from mla_compile.ops import mla_attention, mla_select_keys
from mla_compile.ops.attention.mla_attention import up_projections
from mla_compile.ops.attention.norm_rope import rotate_first
from mla_compile.ops.experts.moe import moe_experts

if TYPE_CHECKING:
    from mla_compile.integrations.transformers.cache import IndexerKeys, PagedLatentCache

ATTENTION = "mla_compile"
"""The name of `attention` in transformers' `AttentionInterface`. No mask function has that name, so transformers builds
no mask."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """MLA over the paged latents, in the form of transformers' attention functions.

    Args:
        module: the attention module; its `mla_layer` has the latents, the pages and the batch.
        query: `[batch, heads, tokens, qk_nope_head_dim + qk_rope_head_dim]`, rotated.
        key, value: of the new tokens, expanded; not used.
        scaling: multiplies the scores.
        indices: the result of `indexer`, of this layer or of an earlier one that it shares.

    Returns:
        `[batch, tokens, heads, v_head_dim]`, and no attention weights.
    """
    layer = module.mla_layer
    kv_c, k_pe = layer.take()
    batch, heads, tokens, _width = query.shape
    widths = [module.qk_nope_head_dim, module.qk_rope_head_dim]
    if query.device.type == "cpu":
        # Mistral4 scales its queries last. Inductor checks the size of a matrix product's unrealized input, which fails
        # for an unbacked size; the output of `cat` is realized.
        query = torch.cat([query[..., : widths[0]], query[..., widths[0] :]], dim=-1)
    q_nope, q_pe = query.transpose(1, 2).flatten(0, 1).split(widths, dim=-1)
    w_uk, w_uv = up_projections(module.kv_b_proj.weight, heads, module.qk_nope_head_dim)
    out = mla_attention(
        q_nope,
        q_pe,
        kv_c.flatten(0, 2),
        k_pe.flatten(0, 2),
        layer.kv_cache,
        w_uk,
        w_uv,
        layer.owner.batch,
        scaling,
        None if indices is None else indices.flatten(0, 1),
    )
    return out.view(batch, tokens, heads, module.v_head_dim), None


AttentionInterface.register(ATTENTION, attention)


INDEXERS = {"DeepseekV32Indexer": False, "GlmMoeDsaIndexer": True}
"""The classes of indexers that `indexer` can replace, and whether their rotated pairs are adjacent."""


def indexer(
    module: Any,
    keys: "IndexerKeys",
    hidden: Tensor,
    q_latent: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """Selection of keys, in the form of transformers' indexers of `INDEXERS`, with the module's own layers.

    hidden, q_latent: `[batch, tokens, hidden_size]` and `[batch, tokens, q_lora_rank]`; position_embeddings: cos and
    sin, `[batch, tokens, qk_rope_head_dim]`. Returns slots where transformers has positions, int32
    `[batch, tokens, topk]`.
    """
    x, (cos, sin) = hidden.flatten(0, 1), (angles.flatten(0, 1) for angles in position_embeddings)
    rotary, interleaved = module.qk_rope_head_dim, INDEXERS[type(module).__name__]
    assert keys.kv_cache is not None
    assert keys.owner.batch is not None
    q = module.wq_b(q_latent).view(-1, module.n_heads, module.head_dim)
    head_weights = module.weights_proj(x.to(module.weights_proj.weight.dtype)).float()
    selected = mla_select_keys(
        rotate_first(q, rotary, cos.unsqueeze(1), sin.unsqueeze(1), interleaved),
        rotate_first(module.k_norm(module.wk(x)), rotary, cos, sin, interleaved),
        head_weights * (module.n_heads**-0.5 * module.softmax_scale),
        keys.kv_cache,
        keys.owner.batch,
        topk=module.index_topk,
    )
    of_batch: Tensor = selected.unflatten(0, hidden.shape[:2])
    return of_batch


def has_our_experts(module: Any) -> bool:
    """Whether `experts` can replace a module: gated SiLU experts in two stacked weights, without biases."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    return (
        isinstance(gate_up, nn.Parameter)
        and isinstance(down, nn.Parameter)
        and gate_up.dim() == down.dim() == 3
        and gate_up.shape[1:] == (2 * down.shape[2], down.shape[1])
        and isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)
        and not any("bias" in name for name, _ in module.named_parameters())
    )


def experts(
    module: Any, cache: "PagedLatentCache", hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """Routed experts, in the form of transformers' expert modules: `[tokens, hidden_size]` to the same.

    cache: its `batch` maps tokens to rows. Ids past the stacked weights are LongCat-Flash's zero-computation experts,
    which return their input.
    """
    num_experts = module.down_proj.shape[0]
    w_gate_up = module.gate_up_proj[:num_experts]
    if getattr(module, "zero_expert_num", 0) == 0:
        return moe_experts(hidden, topk_weights, topk_ids, w_gate_up, module.down_proj, cache.batch)
    routed = topk_ids < num_experts
    kept = torch.where(routed, topk_weights, 0)
    ids = torch.where(routed, topk_ids, 0)
    out = moe_experts(hidden, kept, ids, w_gate_up, module.down_proj, cache.batch)
    identity = torch.where(routed, 0, topk_weights).sum(dim=-1, keepdim=True)
    return out + (hidden * identity).to(hidden.dtype)
