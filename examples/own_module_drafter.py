"""Your own model in an engine, with drafters that read the outputs of its layers.

    python examples/own_module_drafter.py [--no-compile]

`Served` has the layers of `own_module.py` and the members that an engine calls (docs/own-module.md lists them). Its
forward returns the outputs of the layers that a drafter names, the aux hidden states, beside the final hidden states.
Two drafters read them, and the tokens stay those of plain decoding:

- `Heads`, a drafter of your own: one linear map per draft, fitted to the model's own texts by least squares;
- an EAGLE-3 head in a directory. This one has random weights, so few of its drafts are accepted; the files of a trained
  head are the same.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from own_module import HEADS, HIDDEN, NOPE, RANK, ROPE, VOCAB, Block, V
from safetensors.torch import save_file
from torch import Tensor, nn

from mla_compile import Engine, MLABatch, prefill_segment
from mla_compile.batch import ForwardOutput
from mla_compile.caches import CacheSpec, allocate
from mla_compile.speculate import DecodeState, DrafterKind, PromptChunks, Verified

AUX_LAYERS, DRAFTS, PAGE_SIZE = (0, 1), 3, 4


class Served(nn.Module):
    """A model that an engine can run: a `ServedModel`."""

    vocab_size, hidden_size = VOCAB, HIDDEN
    has_mtp = is_recurrent = False

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.num_aux_layers = num_layers  # drafters may read the outputs of layers 0 to num_layers - 1
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def prepare(self, num_pages: int) -> None:
        """Rows have no state besides the caches."""

    def cache_specs(self) -> list[CacheSpec]:
        """One cache per layer. The engine allocates it and sets the layer's attribute `kv_cache`."""
        width, dtype = RANK + ROPE, self.head.weight.dtype
        return [
            CacheSpec(f"layers.{i}", "target", width, dtype, self.device, layer)
            for i, layer in enumerate(self.layers)
        ]

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: MLABatch, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """Token ids `[tokens]` to hidden states, with the outputs of `aux_layers` in their order."""
        x, outputs = self.embed(token_ids), {}
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, batch)
            if i in aux_layers:
                outputs[i] = x
        return ForwardOutput(self.norm(x), tuple(outputs[i] for i in aux_layers))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Heads(nn.Module):
    """One product maps the aux hidden states of each row's last verified token to the logits of k drafts.

    weights: `[len(aux_layers) * HIDDEN, k * VOCAB]`.
    """

    aux_layers = AUX_LAYERS

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights)

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """`output.aux` has the aux hidden states of prompt chunks. A drafter with a cache writes it here."""

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """int64 `[rows, k]`. `verified.output` has 1 + k tokens per row; `accepted` is the index of the last one."""
        first = torch.arange(verified.accepted.shape[0], device=state.drafts.device) * (1 + verified.k)
        aux = torch.cat(verified.output.aux, dim=-1).index_select(0, first + verified.accepted)
        return (aux @ self.weights).view(-1, verified.k, VOCAB).argmax(dim=-1)


def fit(model: Served, texts: Sequence[Sequence[int]]) -> Tensor:
    """The weights of `Heads`: from the aux hidden states at position i to the token at i + 2 + j, in all texts."""
    lens, pages = [len(text) for text in texts], -(-max(map(len, texts)) // PAGE_SIZE)
    table = 1 + torch.arange(len(texts) * pages, dtype=torch.int32).view(len(texts), pages)
    allocate(model.cache_specs(), 1 + len(texts) * pages, PAGE_SIZE)
    segment, positions = prefill_segment(lens, [0] * len(texts), table, page_size=PAGE_SIZE)
    tokens = torch.tensor([token for text in texts for token in text])
    output = model(tokens, positions, MLABatch(prefill=segment), AUX_LAYERS)
    weights = []
    for ahead in range(2, 2 + DRAFTS):
        x = torch.cat([aux[:-ahead] for aux in torch.cat(output.aux, dim=-1).split(lens)])
        y = F.one_hot(torch.cat([of_text[ahead:] for of_text in tokens.split(lens)]), VOCAB).to(x.dtype)
        weights.append(torch.linalg.solve(x.T @ x + 1e-3 * len(x) * torch.eye(x.shape[1]), x.T @ y))
    return torch.cat(weights, dim=1)


def write_head(directory: Path) -> None:
    """An EAGLE-3 head with MLA and random weights, as config.json and safetensors."""
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
    sizes |= {"num_attention_heads": HEADS, "q_lora_rank": RANK, "kv_lora_rank": RANK}
    sizes |= {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V}
    layers = {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS}
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "eagle_config": layers, **sizes}
    attention = {"q_a_proj": (RANK, 2 * HIDDEN), "q_a_layernorm": (RANK,), "kv_a_layernorm": (RANK,)}
    attention |= {"q_b_proj": (HEADS * (NOPE + ROPE), RANK), "kv_b_proj": (HEADS * (NOPE + V), RANK)}
    attention |= {"kv_a_proj_with_mqa": (RANK + ROPE, 2 * HIDDEN), "o_proj": (HIDDEN, HEADS * V)}
    mlp = {f"{name}_proj": (2 * HIDDEN, HIDDEN) for name in ("gate", "up")}
    mlp["down_proj"] = (HIDDEN, 2 * HIDDEN)
    shapes = {"fc": (HIDDEN, len(AUX_LAYERS) * HIDDEN), "norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    shapes |= {f"midlayer.self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"midlayer.mlp.{name}": shape for name, shape in mlp.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}"] = (HIDDEN,)
    weights = {f"{name}.weight": torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")


def main(max_new_tokens: int = 40, *, compile: bool | None = None) -> None:
    """Complete prompts without drafts, with `Heads` and with an EAGLE-3 head: the tokens are the same."""
    torch.manual_seed(0)
    model = Served(num_layers=2).requires_grad_(False)
    prompts = torch.randint(VOCAB, (40, 18)).tolist()
    held_out = prompts[:12]  # more than there are rows: prompts run in chunks, beside rows that decode

    def engine(drafts: int, **settings: object) -> Engine:
        sizes = {"max_rows": 8, "max_model_len": 64, "page_size": PAGE_SIZE, "max_tokens_per_step": 48}
        return Engine(model, num_speculative_tokens=drafts, compile=compile, **sizes, **settings)

    plain = engine(0).generate(prompts, max_new_tokens=max_new_tokens)
    expected = [completion.token_ids for completion in plain]
    weights = fit(model, [prompt + text for prompt, text in zip(prompts[12:], expected[12:], strict=True)])
    with tempfile.TemporaryDirectory() as directory:
        write_head(Path(directory))
        for name, drafts, settings in (
            ("no drafts", 0, {}),
            ("Heads", DRAFTS, {"drafter": DrafterKind("heads", lambda settings: Heads(weights))}),
            ("EAGLE-3, random", DRAFTS, {"drafter_model": directory}),
        ):
            served = engine(drafts, **settings)
            completions = served.generate(held_out, max_new_tokens=max_new_tokens)
            assert [completion.token_ids for completion in completions] == expected[:12], "the same tokens"
            stats = served.stats
            print(
                f"{name:16} {stats.num_steps:4} steps, {stats.num_mixed_steps:2} of them mixed,"
                f" {stats.acceptance_length:.2f} tokens a verification"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)  # for matrices this small, several threads mostly wait for each other
    main(compile=False if "--no-compile" in sys.argv else None)
