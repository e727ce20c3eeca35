"""EAGLE-3 heads (arXiv 2503.01840), and EAGLE-3.1: one layer that drafts from the outputs of target layers.

At position i the layer reads the token i + 1 and a hidden state. A pass over verified positions takes the hidden state
from the target: the outputs of some of its layers, joined by `fc`. A chained draft takes the layer's own output.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.caches import CacheSpec
from mla_compile.errors import MLAError
from mla_compile.hub import find_checkpoint
from mla_compile.models.architecture import Architecture
from mla_compile.models.attention import MLAAttention
from mla_compile.models.checkpoint import check_tensors
from mla_compile.models.eagle3_config import HeadConfig, lacks
from mla_compile.models.grouped_query import GroupedQueryAttention
from mla_compile.models.layers import MLP, RMSNorm, random_embedding
from mla_compile.models.layout import pack_adjacent
from mla_compile.models.parallel import Parallel, gathered
from mla_compile.models.rotary import RotaryEmbedding
from mla_compile.models.safetensor_files import SafetensorFiles

_HEAD = "lm_head.weight"
_LAYER = ("midlayer.", "layers.0.")
"""The names of the layer in checkpoints: SafeAILab's and SpecForge's, and that of others."""


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads an embedding beside the hidden state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps, shapes = config.hidden_size, config.rms_norm_eps, config.attention
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn: MLAAttention | GroupedQueryAttention
        if isinstance(shapes, Architecture):
            self.self_attn = MLAAttention(shapes, input_size=2 * size)
        else:
            self.self_attn = GroupedQueryAttention(shapes, input_size=2 * size, output_size=size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)

    def fill(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch) -> None:
        """Write the cache at prompt chunks; arguments as in `forward`."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        self.self_attn.fill(both, rope, batch)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch
    ) -> Tensor:
        """`embedded` and `hidden` `[tokens, hidden_size]` of decode rows to `[tokens, hidden_size]`."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(both, rope, batch)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The weights of a head, and its passes.

    Processes that share the target have whole heads, but each has a part of the rows of `lm_head`. A product's bits may
    differ between processes, and all must draft the same ids.

    parallel: this process's place among those.
    place: for each id of the target's vocabulary, its place among the ids that the head can draft, int64
        `[vocab_size]`; `draft_vocab_size` for an id that it cannot draft. None if it can draft all.
    """

    place: Tensor | None

    def __init__(
        self,
        config: HeadConfig,
        num_aux_layers: int,
        *,
        has_embedding: bool,
        maps_ids: bool,
        parallel: Parallel | None,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        num_processes = 1 if parallel is None else parallel.size
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_output = config.norm_output
        self.fc = nn.Linear(num_aux_layers * size, size, bias=False)
        self.input_norm = RMSNorm(num_aux_layers * size, eps) if config.norm_before_fc else None
        norms = [RMSNorm(size, eps) for _ in range(num_aux_layers)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size // num_processes, bias=False)
        self.embed_tokens = random_embedding(config.vocab_size, size) if has_embedding else None
        self.rotary = RotaryEmbedding(config.rope)
        place = torch.zeros(config.vocab_size, dtype=torch.int64) if maps_ids else None
        self.register_buffer("place", place, persistent=False)
        self.requires_grad_(False)

    def cache_specs(self) -> list[CacheSpec]:
        """The cache of the layer."""
        return self.layer.self_attn.cache_specs("eagle3.self_attn", "drafter", lookahead=1)

    def join(self, aux: Sequence[Tensor]) -> Tensor:
        """The outputs of the target's layers, each `[tokens, hidden_size]`, to hidden states."""
        if self.fc_norm is not None:
            aux = [norm(each) for norm, each in zip(self.fc_norm, aux, strict=True)]
        size = self.fc.out_features
        if wrong := [tuple(each.shape) for each in aux if each.shape[-1] != size]:
            raise MLAError("model", f"outputs of layers that are {size} wide, as its `hidden_size`", wrong[0])
        joined = torch.cat(list(aux), dim=-1)
        hidden: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return hidden

    def fill(self, embedded: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch) -> None:
        """Write the layer's cache at the `positions` `[tokens]` of prompt chunks."""
        self.layer.fill(embedded, hidden, self.rotary(positions), batch)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        """The layer at `positions` `[tokens]` of decode rows: hidden states for a chained draft, and for `logits`."""
        hidden = self.layer(embedded, hidden, self.rotary(positions), batch)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to logits of the target's ids, `[..., vocab_size]`; -inf for those it cannot draft."""
        logits = gathered(self.lm_head(hidden if self.norm_output else self.norm(hidden)), self.parallel)
        if self.place is None:
            return logits
        return F.pad(logits, (0, 1), value=-torch.inf).index_select(-1, self.place)


def load_head(path: str | Path, model: Any, *, on_meta: bool = False) -> tuple[Eagle3Head, tuple[int, ...]]:
    """The head in a directory for a target, in the target's dtype, and the target's layers whose outputs it reads.

    path: the head's directory, or ORG/NAME of one in the local Hugging Face cache.
    model: the target, with `hidden_size`, `vocab_size`, `num_aux_layers`, `device`, `cache_specs` and, for a head
        without embeddings, `embed`.
    on_meta: leave the head on the meta device and read no weight, as if the target were there.

    Raises:
        MLAError: a missing or unreadable file, a head of another kind or for another target, missing, extra or
            misshapen tensors, ids outside the vocabulary; before any memory is allocated.
    """
    directory = _directory(path)
    config = HeadConfig.read(directory)
    layers = config.layers_of(model)
    files = SafetensorFiles(directory)
    has_embedding, maps_ids = "embed_tokens.weight" in files.entries, "d2t" in files.entries
    if not has_embedding and not hasattr(model, "embed"):
        raise lacks(model, "embed")
    if not maps_ids and config.draft_vocab_size != config.vocab_size:
        raise MLAError(str(directory), "a tensor d2t, as its vocabulary is reduced", "none")
    parallel: Parallel | None = getattr(model, "parallel", None)
    if parallel is not None and config.draft_vocab_size % parallel.size:
        expected = f"a multiple of the number of processes, {parallel.size}"
        raise MLAError(f"{config.file}: draft_vocab_size", expected, config.draft_vocab_size)
    with torch.device("meta"):
        head = Eagle3Head(
            config, len(layers), has_embedding=has_embedding, maps_ids=maps_ids, parallel=parallel
        ).to(model.cache_specs()[0].dtype)
    layer = next((each for each in _LAYER if any(name.startswith(each) for name in files.entries)), _LAYER[0])

    def parameters() -> Iterator[tuple[str, nn.Parameter]]:
        """With their names in the files."""
        for name, parameter in head.named_parameters():
            yield (layer + name.removeprefix("layer.") if name.startswith("layer.") else name), parameter

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters()}
    shapes[_HEAD] = (config.draft_vocab_size, config.hidden_size)
    entries = {name: entry for name, entry in files.entries.items() if name not in ("d2t", "t2d")}
    expected = "the tensors of an EAGLE-3 head with its config"
    check_tensors(directory, entries, shapes, {}, expected=expected, may_be_fp8=False)
    place = _place(files, directory, config) if maps_ids else None
    if on_meta or model.device.type == "meta":
        return head, layers
    head.to_empty(device=model.device)
    pack_adjacent(head)
    for name, parameter in parameters():
        weight = files.read(name)
        if name == _HEAD and parallel is not None:
            weight = weight.chunk(parallel.size)[parallel.rank]
        parameter.copy_(weight)
    files.check_unchanged()
    if place is not None:
        head.place = place.to(model.device)
    return head.eval(), layers


def check_head(path: str | Path) -> None:
    """Raises `MLAError` if there is no head, by its config; no other file is opened."""
    HeadConfig.read(_directory(path))


def _directory(path: str | Path) -> Path:
    directory = find_checkpoint(path, "drafter_model")
    if not directory.is_dir():
        got = f"{directory}, a file" if directory.exists() else f"{directory}, which does not exist"
        raise MLAError("drafter_model", "a directory with an EAGLE-3 head", got)
    return directory


def _place(files: SafetensorFiles, directory: Path, config: HeadConfig) -> Tensor:
    """See `Eagle3Head`; from `d2t`, the offsets from the head's ids to the target's."""
    draft_vocab_size, vocab_size = config.draft_vocab_size, config.vocab_size
    entry = files.entries["d2t"]
    if entry.shape != (draft_vocab_size,) or entry.dtype not in ("I64", "I32"):
        raise MLAError(f"{directory}: d2t", f"int64 [{draft_vocab_size}]", entry)
    draft_ids = torch.arange(draft_vocab_size)
    target_ids = draft_ids + files.read("d2t").long()
    if ((target_ids < 0) | (target_ids >= vocab_size)).any() or len(target_ids.unique()) < draft_vocab_size:
        expected = f"offsets to different ids in [0, {vocab_size})"
        raise MLAError(f"{directory}: d2t", expected, "others")
    place = torch.full((vocab_size,), draft_vocab_size)
    place[target_ids] = draft_ids
    return place
