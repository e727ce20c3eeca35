"""An EAGLE-3 head with MLA in plain PyTorch, with gradients: its parameters have the names of SpecForge's checkpoints.

The ops of mla_compile are for inference. `tests/examples/test_eagle3_head.py` compares the two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Keys = list[tuple[Tensor, Tensor]]
"""Keys and values `[batch, heads, tokens, width]` of each draft step."""


def linear(inputs: int, outputs: int) -> nn.Linear:
    """The scale of the input is kept."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.8 * inputs**-0.5)
    return layer


class Attention(nn.Module):
    """DeepSeek's MLA with K and V expanded."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.rank = config["num_attention_heads"], config["kv_lora_rank"]
        self.nope, self.rope, self.value = (
            config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v")
        )
        hidden, queries, eps = config["hidden_size"], config["q_lora_rank"], config["rms_norm_eps"]
        self.q_a_proj = linear(2 * hidden, queries)
        self.q_a_layernorm = nn.RMSNorm(queries, eps)
        self.q_b_proj = linear(queries, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(2 * hidden, self.rank + self.rope)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps)
        self.kv_b_proj = linear(self.rank, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, hidden)
        nn.init.zeros_(self.o_proj.weight)
        freqs = config["rope_theta"] ** (-torch.arange(0, self.rope, 2) / self.rope)
        self.register_buffer("freqs", freqs, persistent=False)

    def forward(self, x: Tensor, depth: int, earlier: Keys) -> Tensor:
        """A draft sees the keys of true hidden states up to its own place, and those of its own chain.

        x: `[batch, tokens, 2 * hidden]` of draft step `depth`, at positions `depth`, `depth + 1`, ....
        earlier: of the steps before; this step's are appended.
        """
        length = x.shape[1]
        angles = torch.arange(depth, depth + length, device=x.device)[:, None] * self.freqs
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_pe = q.unflatten(-1, (self.heads, -1)).transpose(1, 2).split([self.nope, self.rope], -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.value], -1)
        q = torch.cat([q_nope, rotated(q_pe, angles).to(q_nope.dtype)], -1)
        k_pe = rotated(k_pe, angles).to(k_nope.dtype)[:, None].expand(-1, self.heads, -1, -1)
        earlier.append((torch.cat([k_nope, k_pe], -1), v))
        (key, value), *chain = earlier
        if not chain:
            out = F.scaled_dot_product_attention(q, key, value, is_causal=True)
        else:
            q = q * (self.nope + self.rope) ** -0.5
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ key.transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)
            own = torch.stack([(q * k).sum(-1) for k, _ in chain], -1)
            weights = torch.cat([scores, own.float()], -1).softmax(-1).to(v.dtype)
            out = weights[..., :length] @ value
            for i, (_, v) in enumerate(chain, start=length):
                out = out + weights[..., i, None] * v
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of the last axis, rotated. angles: `[tokens, width / 2]`."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, config["intermediate_size"])

    def forward(self, embedded: Tensor, hidden: Tensor, depth: int, keys: Keys) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, depth, keys)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Head(nn.Module):
    """An EAGLE-3 head, or EAGLE-3.1 with `fc_norm` and `norm_output` in its config."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        num_aux = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.norm_output = config["norm_output"]
        norms = [nn.RMSNorm(hidden, eps) for _ in range(num_aux)]
        self.fc_norm = nn.ModuleList(norms) if config["fc_norm"] else None
        self.fc = linear(num_aux * hidden, hidden)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config["draft_vocab_size"], bias=False)

    def forward(self, aux: Tensor, embedded: list[Tensor]) -> list[Tensor]:
        """What each draft step passes to `lm_head`; step d at position i drafts token i + d + 2.

        aux: the target's outputs, `[batch, tokens, num_aux, hidden]`. embedded: of the tokens i + d + 1, for each d.
        """
        if self.fc_norm is not None:
            aux = torch.stack([norm(x) for norm, x in zip(self.fc_norm, aux.unbind(-2))], -2)
        hidden, keys, outputs = self.fc(aux.flatten(-2)), Keys(), list[Tensor]()
        for depth, each in enumerate(embedded):
            hidden = self.midlayer(each, hidden, depth, keys)
            outputs.append(self.norm(hidden))
            hidden = outputs[-1] if self.norm_output else hidden
        return outputs
