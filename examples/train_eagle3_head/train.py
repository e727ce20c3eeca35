"""Train an EAGLE-3 head with MLA for the shipped model, on a CPU.

    python examples/train_eagle3_head/train.py --out head      # after examples/train_shipped_model/corpus.py

The target runs once over windows of its own training text, and the outputs of some of its layers are kept. The loss is
that of EAGLE-3's training-time test: the head runs as many draft steps as at inference, each on its own output of the
step before, and every step is compared with the target's distribution.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from head import Head
from safetensors.torch import save_file
from torch import Tensor

from mla_compile import MLABatch, load_model, load_tokenizer, prefill_segment
from mla_compile.caches import allocate
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.models import MLAForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "train_shipped_model"))
from corpus import CORPUS, END_OF_TEXT
from schedule import optimizer, schedule

CHAIN = 3  # draft steps
PAGE = 32  # tokens
SOURCES = {"bible_train": 0.46, "python_train": 0.46, "tests_train": 0.08}
RATE = 5e-3


def config_of(target: MLAForCausalLM, draft_vocab_size: int) -> dict[str, Any]:
    """config.json: an EAGLE-3 head as SpecForge writes it."""
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": target.hidden_size,
        "num_attention_heads": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 16,
        "intermediate_size": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": target.max_position_embeddings,
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 6, 9], "use_aux_hidden_state": True},
    }


def texts_of(corpus: Path, count: int, length: int) -> Tensor:
    """At most `count` windows of the training text in the target's tokens, int64 `[texts, length]`."""
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    assert tokenizer is not None
    found = []
    for name, share in SOURCES.items():
        documents = (corpus / f"{name}.txt").read_text("utf-8").split(f"\n{END_OF_TEXT}\n")
        chosen = random.choices(documents, map(len, documents), k=round(share * count))
        for text in chosen:
            start = random.randrange(len(text))
            ids = tokenizer(text[start : start + 8 * length])["input_ids"][1:]  # the first may be half a word
            found += [ids[:length]] if len(ids) >= length else []
    return torch.tensor(found)


@torch.no_grad()
def outputs_of(target: MLAForCausalLM, texts: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The outputs of layers, `[texts, tokens, layers, hidden]`, and final hidden states, in bfloat16."""
    rows, length = 4, texts.shape[1]
    allocate(target.cache_specs(), 1 + rows * length // PAGE, PAGE)
    aux, final = [], []
    for part in texts.split(rows):
        table = 1 + torch.arange(len(part) * length // PAGE, dtype=torch.int32).view(len(part), -1)
        segment, positions = prefill_segment([length] * len(part), [0] * len(part), table, page_size=PAGE)
        output = target(part.flatten(), positions, MLABatch(prefill=segment), layers)
        aux.append(torch.stack(output.aux, 1).bfloat16().unflatten(0, part.shape))
        final.append(output.hidden.bfloat16().unflatten(0, part.shape))
    return torch.cat(aux), torch.cat(final)


def losses(
    head: Head, target: MLAForCausalLM, ids: Tensor, texts: Tensor, aux: Tensor, final: Tensor
) -> Tensor:
    """For each draft step, the cross entropy with the target's distribution plus that with its first choice.

    A draft step whose tokens are not the target's first choices, so that drafting does not reach it, counts little.

    ids: target ids that the head can draft.
    """
    length = texts.shape[1] - CHAIN
    embedded = [target.embed(texts[:, d + 1 : d + 1 + length]) for d in range(CHAIN)]
    with torch.no_grad():
        logits = F.linear(final, target.embed_tokens.weight[ids]).float()
        wanted, first = logits.softmax(-1), logits.argmax(-1)
        agrees = (ids[first[:, :-1]] == texts[:, 1:]).float()
    found, reached = [], torch.ones(len(texts), length)
    for d, hidden in enumerate(head(aux[:, :length], embedded)):
        reached = reached * agrees[:, d : d + length] if d else reached
        at = slice(d + 1, d + 1 + length)
        drafted = head.lm_head(hidden).float().log_softmax(-1)
        hard = drafted.gather(-1, first[:, at, None])[..., 0]
        loss = -(drafted * wanted[:, at]).sum(-1) - hard
        weight = 0.1 + reached
        found.append((loss * weight).sum() / weight.sum())
    return torch.stack(found)


def train(
    head: Head, target: MLAForCausalLM, ids: Tensor, data: list[Tensor], args: argparse.Namespace
) -> None:
    optim, started = optimizer([head], torch.device("cpu")), time.monotonic()
    order = torch.cat([torch.randperm(len(data[0])) for _ in range(args.epochs)]).split(args.batch)
    for step, chosen in enumerate(order):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            each = losses(head, target, ids, *(x[chosen] for x in data))
        for group in optim.param_groups:
            group["lr"] = schedule(step / len(order), RATE)
        each.sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == len(order) - 1:
            entry = {"step": step, "seconds": round(time.monotonic() - started), "losses": each.tolist()}
            print(json.dumps(entry), flush=True)


def save(head: Head, ids: Tensor, config: dict[str, Any], folder: Path) -> None:
    """config.json and model.safetensors in bfloat16, with SpecForge's names."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.detach().bfloat16().contiguous() for name, x in head.named_parameters()}
    if len(ids) < config["vocab_size"]:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--texts", type=int, default=1900, help="windows of the training text")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--vocabulary", type=int, default=1024, help="ids that the head can draft")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=12, help="texts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    target = load_model(SHIPPED_MODEL, dtype=torch.float32, device="cpu", mtp=False)
    texts = texts_of(args.corpus, args.texts, args.length)
    counts = torch.bincount(texts.flatten(), minlength=target.vocab_size)
    ids = counts.topk(args.vocabulary).indices.sort().values
    config = config_of(target, len(ids))
    data = [texts, *outputs_of(target, texts, config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])]
    head = Head(config)
    head.lm_head.weight.data.copy_(target.embed_tokens.weight[ids])
    head.fc.weight.data[:, -target.hidden_size :] += torch.eye(target.hidden_size)  # the last layer's output
    train(head, target, ids, data, args)
    save(head, ids, config, args.out)


if __name__ == "__main__":
    main()
