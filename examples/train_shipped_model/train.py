"""Train the shipped model on one GPU, against the clock.

    python train.py --minutes 7 --out shipped      # an H200; see README.md

Two phases, each with a cosine schedule over its share of the time:

1. trunk and MTP layer together, next-token loss plus a small loss for each of three chained drafts;
2. the trunk stands still and the MTP layer learns to foretell the trunk's own choices: greedy acceptance is agreement
   with the trunk, not with the text.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from attention import pick_attention, set_attention
from evaluate import CORPUS, DOMAINS, measure
from export import export
from model import CHAIN, balance, build, chain_mask, mtp_chain, shipped_config
from plot import plot
from schedule import optimizer, schedule, ticks
from tokenizers import Tokenizer
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpLayer

# Rows of a batch by source: the two domains that the model is shown with, and the test suite as a regulariser.
ROWS = {"bible_train": 12, "python_train": 12, "tests_train": 8}
DOCUMENT_STARTS = 0.3  # share of windows that begin with a document, as a prompt does
MTP_WEIGHT = 0.1  # of each chained depth in phase 1
JOINT_SHARE = 0.72  # of the time
JOINT_RATE, DRAFT_RATE = 3e-3, 1.5e-3
BALANCE_RATE = 3e-3
COLLAPSE_AFTER = 400  # steps


@dataclass
class Run:
    """What every step needs, and the log."""

    trunk: DeepseekV3ForCausalLM
    mtp: MtpLayer
    device: torch.device
    length: int
    log: Path
    data: dict[str, Tensor] = field(default_factory=dict)
    documents: dict[str, Tensor] = field(default_factory=dict)  # where they begin, by source
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    tokens: int = 0

    def write(self, **values: object) -> None:
        entry = {"seconds": round(time.monotonic() - self.started, 1), "step": self.step, **values}
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in entry.items()})
        print(line, flush=True)
        with self.log.open("a") as file:
            file.write(line + "\n")

    def windows(self, name: str, starts: Tensor) -> Tensor:
        """Token windows [rows, length + CHAIN + 1] of one source."""
        return self.data[name][
            starts[:, None] + torch.arange(self.length + CHAIN + 1, device=self.device)
        ].long()

    def batch(self, scale: float) -> Tensor:
        parts = []
        for name, rows in ROWS.items():
            shape = (max(1, int(rows * scale)),)
            anywhere = torch.randint(self.last_start(name) + 1, shape, device=self.device)
            documents = self.documents[name]
            beginning = documents[torch.randint(len(documents), shape, device=self.device)]
            chosen = torch.rand(shape, device=self.device) < DOCUMENT_STARTS
            parts.append(self.windows(name, torch.where(chosen, beginning, anywhere)))
        return torch.cat(parts)

    def last_start(self, name: str) -> int:
        return len(self.data[name]) - self.length - CHAIN - 1

    def load(self, folder: Path) -> None:
        """Token arrays on the device, and where documents begin: after each end-of-text token, id 0."""
        for file in sorted(folder.glob("*.npy")):
            ids = torch.from_numpy(np.load(file).astype(np.int32)).to(self.device)
            self.data[file.stem] = ids
            starts = (ids == 0).nonzero()[:, 0] + 1
            self.documents[file.stem] = starts[starts <= self.last_start(file.stem)]

    def rows(self, scale: float) -> int:
        return sum(max(1, int(rows * scale)) for rows in ROWS.values())

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def cross_entropy(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token loss through the tied head. hidden [batch, length, width], targets [batch, length]"""
    return F.cross_entropy(F.linear(hidden, embedding).float().flatten(0, 1), targets.flatten())


def distillation(hidden: Tensor, teacher: Tensor, embedding: Tensor, weight: Tensor) -> Tensor:
    """How far a draft is from the trunk: soft cross-entropy plus that of the trunk's argmax, weighted per position.

    hidden, teacher [batch, length, width]; weight [batch, length]
    """
    target = F.linear(teacher, embedding).float()
    predicted = F.linear(hidden, embedding).float().log_softmax(-1)
    soft = -(target.softmax(-1) * predicted).sum(-1)
    hard = -predicted.gather(-1, target.argmax(-1, keepdim=True))[..., 0]
    return ((soft + hard) * weight).sum() / weight.sum()


def agreement(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Where the trunk's argmax is the text itself, [batch, length] of 0 and 1."""
    return (F.linear(hidden, embedding).argmax(-1) == targets).float()


def compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def train_step(run: Run, loss: Tensor, optim: torch.optim.AdamW, rate: float) -> None:
    for group in optim.param_groups:
        group["lr"] = rate
    loss.backward()
    nn.utils.clip_grad_norm_([p for g in optim.param_groups for p in g["params"]], 1.0)
    optim.step()
    optim.zero_grad(set_to_none=True)
    run.step += 1


def joint_phase(run: Run, args: argparse.Namespace, until: float) -> None:
    """Phase 1: everything learns from the text."""
    optim = optimizer([run.trunk, run.mtp], run.device)
    loss_of = compiled(cross_entropy, run.device)
    embedding = run.trunk.model.embed_tokens.weight
    masks = [chain_mask(run.length, d, run.device) for d in range(CHAIN)]
    for progress in ticks(until, args.steps and args.steps[0]):
        tokens = run.batch(args.scale)
        rate = schedule(progress, JOINT_RATE)
        with run.autocast():
            hidden = run.trunk.model(tokens[:, : run.length], use_cache=False).last_hidden_state
            states = [hidden, *mtp_chain(run.trunk, run.mtp, hidden, tokens, masks)]
            losses = [
                loss_of(s, embedding, tokens[:, d + 1 : d + 1 + run.length]) for d, s in enumerate(states)
            ]
            total = losses[0] + MTP_WEIGHT * sum(losses[1:])
        train_step(run, total, optim, rate)
        run.tokens += tokens.shape[0] * run.length
        balancing = BALANCE_RATE * min(1.0, 2 * (1 - progress))
        loads = [balance(list(module.modules()), balancing) for module in (run.trunk, run.mtp)]
        if run.step % args.log_every == 0 or run.step <= 3:
            names = ("loss", "draft1", "draft2", "draft3")
            values = dict(zip(names, torch.stack(losses).tolist(), strict=True))
            values |= dict(zip(("worst_load", "worst_mtp_load"), map(float, loads), strict=True))
            run.write(phase="joint", tokens=run.tokens, rate=rate, **values)
            stop_if_broken(run, values)
        if run.step % args.validate_every == 0:
            validate(run, run.rows(args.scale), loss_of)


def stop_if_broken(run: Run, values: dict[str, float]) -> None:
    """Spare the machine a run that cannot end well: a loss that is no number, or all tokens at the same experts."""
    config = run.trunk.config
    if not all(map(math.isfinite, values.values())):
        raise SystemExit(f"step {run.step}: a loss is no number")
    collapsed = 0.99 * config.n_routed_experts / config.num_experts_per_tok
    if run.step >= COLLAPSE_AFTER and values.get("worst_mtp_load", 0.0) > collapsed:
        raise SystemExit(f"step {run.step}: the MTP layer sends every token to the same experts")


@torch.no_grad()
def validate(run: Run, rows: int, loss_of: Callable[..., Tensor]) -> None:
    """Loss without dropout on seen and on held-out text, over windows spread evenly, in a training batch's shape."""
    run.trunk.eval()
    result = {}
    for name in (f"{domain}_{split}" for domain in DOMAINS for split in ("train", "held")):
        starts = torch.linspace(0, run.last_start(name), rows, device=run.device).long()
        tokens = run.windows(name, starts)
        with run.autocast():
            hidden = run.trunk.model(tokens[:, : run.length], use_cache=False).last_hidden_state
            loss = loss_of(hidden, run.trunk.model.embed_tokens.weight, tokens[:, 1 : run.length + 1])
        result[name] = float(loss)
    run.trunk.train()
    run.write(phase="validation", tokens=run.tokens, **result)


def draft_phase(run: Run, args: argparse.Namespace, until: float) -> None:
    """Phase 2: the MTP layer learns the trunk's choices; roots where the trunk would leave the text count little."""
    run.trunk.eval().requires_grad_(False)
    run.mtp.eval()  # no dropout: one layer does not overfit here
    optim = optimizer([run.mtp], run.device)
    loss_of, agree_of = compiled(distillation, run.device), compiled(agreement, run.device)
    embedding = run.trunk.model.embed_tokens.weight
    masks = [chain_mask(run.length, d, run.device) for d in range(CHAIN)]
    for progress in ticks(until, args.steps and args.steps[1]):
        tokens = run.batch(args.scale)
        rate = schedule(progress, DRAFT_RATE)
        losses = []
        with run.autocast():
            with torch.no_grad():
                hidden = run.trunk.model(tokens[:, : run.length], use_cache=False).last_hidden_state
                agree = agree_of(hidden, embedding, tokens[:, 1 : run.length + 1])
            weight = torch.ones_like(agree)
            for depth, state in enumerate(mtp_chain(run.trunk, run.mtp, hidden, tokens, masks)):
                # Depth d at i answers the trunk at i + d + 1, and is reached only if tokens i+1 .. i+d+1 were greedy.
                weight = weight * agree.roll(-depth, 1)
                reached = (0.1 + weight) * (
                    torch.arange(run.length, device=run.device) < run.length - depth - 1
                )
                losses.append(loss_of(state, hidden.roll(-depth - 1, 1), embedding, reached))
            total = sum(losses)
        train_step(run, total, optim, rate)
        run.tokens += tokens.shape[0] * run.length
        if run.step % args.log_every == 0:
            values = dict(zip(("draft1", "draft2", "draft3"), torch.stack(losses).tolist(), strict=True))
            run.write(phase="draft", tokens=run.tokens, rate=rate, **values)
            stop_if_broken(run, values)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="for the two phases, compiling included")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the log, the picture and the model"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens in a window")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the rows of a batch")
    parser.add_argument("--steps", type=int, nargs=2, help="steps of each phase, in place of --minutes")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--validate-every", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="two layers, to try the script out on a CPU")
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> Run:
    """Model, data and compiler settings."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = shipped_config(Tokenizer.from_file(str(CORPUS / "tokenizer.json")).get_vocab_size())
    if args.tiny:
        config.num_hidden_layers = 2
    trunk, mtp = build(config)
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "training_log.jsonl"
    log.unlink(missing_ok=True)
    run = Run(trunk.to(device).train(), mtp.to(device).train(), device, args.length, log)
    run.load(CORPUS)
    if device.type == "cuda":
        pick_attention(config, run.rows(args.scale), run.length, run.write)
        for layer in [*trunk.model.layers, mtp]:
            layer.compile(dynamic=False, fullgraph=True)
    return run


def main() -> None:
    args = parse()
    run = prepare(args)
    joint_phase(run, args, run.started + 60 * args.minutes * JOINT_SHARE)
    joint_steps = run.step
    export(run.trunk, run.mtp, CORPUS / "tokenizer.json", args.out / "model")  # should the second phase fail
    draft_phase(run, args, run.started + 60 * args.minutes)
    export(run.trunk, run.mtp, CORPUS / "tokenizer.json", args.out / "model")
    run.write(phase="end", steps=[joint_steps, run.step - joint_steps], seed=args.seed)
    plot(run.log, args.out / "loss_curve.png")
    torch.set_float32_matmul_precision("highest")
    set_attention("flash", "cudnn", "mem_efficient", "math")
    report = measure(args.out / "model", run.device.type)
    run.write(phase="result", tokens=run.tokens, **report)


if __name__ == "__main__":
    main()
