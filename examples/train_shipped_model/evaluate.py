"""Measure an exported model with plain transformers modules in float32: loss, acceptance length, sample text.

python evaluate.py [folder]         # the shipped model by default; minutes on a CPU, seconds on a GPU
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import CHAIN, chain_mask, mtp_chain
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM, DynamicCache
from transformers.modeling_layers import MtpLayer, MtpModel

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / ".corpus"
SHIPPED = ROOT / "mla_compile" / "models" / "shipped"
DOMAINS = ("bible", "python")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 128
SAMPLES = (
    "In the beginning",
    "Psalms 23\n\n",
    "And Jesus said unto them,",
    "def __init__(self",
    "import os\n",
    "class Queue:\n",
)


def load(folder: Path, device: str) -> tuple[DeepseekV3ForCausalLM, MtpLayer]:
    """Trunk and MTP layer in float32, through transformers' own loaders (so the tensor names are checked too)."""
    trunk = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    )
    # transformers looks for MTP tensors where DeepSeek-V3's 61 layers end; ours end earlier.
    trunk._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{trunk.config.num_hidden_layers}.*"]
    mtp = MtpModel.from_pretrained(trunk).layers[0]
    return trunk.to(device).eval(), mtp.to(device=device, dtype=torch.float32).eval()


@torch.no_grad()
def greedy(trunk: DeepseekV3ForCausalLM, prompts: Tensor, new_tokens: int) -> Tensor:
    """Continue prompts [rows, tokens] by argmax, past any end-of-text token. Returns prompts and continuations."""
    tokens, cache, fed = prompts, DynamicCache(config=trunk.config), prompts
    for _ in range(new_tokens):
        fed = trunk(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, fed], 1)
    return tokens


@torch.no_grad()
def draft_hits(trunk: DeepseekV3ForCausalLM, mtp: MtpLayer, tokens: Tensor) -> Tensor:
    """Whether the draft of depth d at root i equals tokens[i + d + 2]; [depths, rows, roots].

    The chain is fed the greedy continuation itself. That is what drafting would feed it wherever the earlier drafts of
    the chain were right, and where one was wrong the later ones do not count.
    """
    length = tokens.shape[1] - CHAIN - 1
    hidden = trunk.model(tokens[:, :length]).last_hidden_state
    masks = [None, *(dense_mask(length, d, tokens.device) for d in range(1, CHAIN))]
    states = mtp_chain(trunk, mtp, hidden, tokens, masks)
    return torch.stack(
        [trunk.lm_head(s).argmax(-1) == tokens[:, d + 2 : d + 2 + length] for d, s in enumerate(states)]
    )


def dense_mask(length: int, depth: int, device: torch.device) -> Tensor:
    mask = chain_mask(length, depth, torch.device("cpu"))
    assert isinstance(mask, Tensor)
    return mask.to(device)


def acceptance_lengths(hits: np.ndarray, first_root: int, k: int) -> float:
    """Tokens emitted per verification with k drafts: in each row, the drafts before the first miss, plus one."""
    steps = emitted = 0
    for row in range(hits.shape[1]):
        root = first_root
        while root < hits.shape[2]:
            accepted = int(np.cumprod(hits[:k, row, root]).sum())
            steps, emitted, root = steps + 1, emitted + accepted + 1, root + accepted + 1
    return emitted / steps


def distinct_share(tokens: Tensor, size: int = 4) -> float:
    """Different runs of `size` tokens over all runs, per row: near 0 where greedy text goes in circles, which drafts
    foretell easily. tokens [rows, n]"""
    shares = []
    for row in tokens.tolist():
        runs = list(zip(*(row[i:] for i in range(size))))
        shares.append(len(set(runs)) / len(runs))
    return sum(shares) / len(shares)


@torch.no_grad()
def held_out_loss(trunk: DeepseekV3ForCausalLM, ids: Tensor, length: int = 1024) -> float:
    """Mean next-token loss in nats over consecutive windows."""
    losses = []
    for window in ids.split(length):
        if len(window) > 1:
            logits = trunk(window[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return float(torch.cat(losses).mean())


def measure(folder: Path, device: str) -> dict[str, object]:
    """All figures and the sample texts."""
    trunk, mtp = load(folder, device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    report: dict[str, object] = {"parameters": sum(p.numel() for m in (trunk, mtp) for p in m.parameters())}
    for domain in DOMAINS:
        ids = torch.from_numpy(np.load(CORPUS / f"{domain}_held.npy").astype(np.int64)).to(device)
        loss = held_out_loss(trunk, ids)
        starts = torch.linspace(0, len(ids) - PROMPT_TOKENS, PROMPTS).long().tolist()
        tokens = greedy(trunk, torch.stack([ids[s : s + PROMPT_TOKENS] for s in starts]), NEW_TOKENS)
        hits = draft_hits(trunk, mtp, tokens).cpu().numpy()
        # The first draft follows the first generated token: its root is the last prompt token.
        lengths = {k: round(acceptance_lengths(hits, PROMPT_TOKENS - 1, k), 3) for k in range(1, CHAIN + 1)}
        characters = len(tokenizer.decode(ids.tolist()))
        bits = loss / math.log(2) * len(ids) / characters
        report[domain] = {
            "held_out_loss": round(loss, 4),
            "perplexity": round(math.exp(loss), 2),
            "bits_per_character": round(bits, 3),
            "acceptance_length": lengths,
            "distinct_4_token_runs": round(distinct_share(tokens[:, PROMPT_TOKENS:]), 3),
            "draft_agreement": [round(float(h[:, PROMPT_TOKENS - 1 :].mean()), 3) for h in hits],
        }
    report["samples"] = {}
    for prompt in SAMPLES:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        report["samples"][prompt] = tokenizer.decode(greedy(trunk, ids, NEW_TOKENS)[0])
    return report


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED
    print(json.dumps(measure(chosen, "cuda" if torch.cuda.is_available() else "cpu"), indent=1))
