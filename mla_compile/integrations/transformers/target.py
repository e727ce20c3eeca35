"""`TransformersTarget`: a transformers model and its MTP layer as a `ServedModel`."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from mla_compile.batch import ForwardOutput, MLABatch
from mla_compile.caches import CacheSpec
from mla_compile.errors import MLAError
from mla_compile.integrations.transformers.cache import PagedLatentCache, attention_layers
from mla_compile.integrations.transformers.functions import (
    ATTENTION,
    INDEXERS,
    experts,
    has_our_experts,
    indexer,
)
from mla_compile.integrations.transformers.recurrent import RecurrentStates
from mla_compile.integrations.transformers.rope import FixedRope

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersTarget(nn.Module):
    """Runs the model's own forward on packed tokens as one sequence `[1, tokens]`.

    Its modules are token-wise, except attention, which is replaced and separates the rows, and recurrent layers, for
    which `RecurrentStates` arranges the tokens in rows. Call it inside `installed()`.
    """

    def __init__(self, model: "PreTrainedModel", mtp_layer: nn.Module | None) -> None:
        """mtp_layer: with the call of transformers' `MtpLayer`; None if no MTP layer drafts.

        Raises:
            MLAError: an unsupported model.
        """
        super().__init__()
        check_model(model)
        self.model: Any = model
        self.mtp_layer = mtp_layer
        self._trunk = PagedLatentCache(model)
        self._mtp = None if mtp_layer is None else PagedLatentCache(mtp_layer)
        self._states = RecurrentStates(self._trunk) if self._trunk.linear else None
        modules: list[Any] = list(self.modules())
        # By identity: equal configs are distinct objects, and comparing them is slow.
        configs: list[Any] = [getattr(module, "config", None) for module in modules]
        self._configs = list({id(c): c for c in configs if hasattr(c, "_attn_implementation")}.values())
        # Made once: a compiled step guards on these objects.
        self._experts: list[tuple[Any, Any]] = [
            (module, partial(experts, module, cache))
            for part, cache in ((model, self._trunk), (mtp_layer, self._mtp))
            if part is not None and cache is not None
            for module in part.modules()
            if has_our_experts(module)
        ]
        self._indexers: list[tuple[Any, Any]] = [
            (keys.indexer, partial(indexer, keys.indexer, keys))
            for cache in (self._trunk, self._mtp)
            if cache is not None
            for keys in cache.indexers.values()
        ]
        layers = enumerate(self.model.get_decoder().layers)
        self._hooks: list[tuple[Any, Any]] = [(layer, partial(self._keep_output, i)) for i, layer in layers]
        block = getattr(mtp_layer, "mtp_block", None)
        self._hooks += [] if block is None else [(block, _hidden_of_block)]
        self._parts = _parts(model)
        self._rope = FixedRope(model)
        self._outputs: dict[int, Any] = {}
        """In a forward, the outputs of the layers that it is asked for, which hooks write within `installed`."""

    @property
    def hidden_size(self) -> int:
        size: int = self.model.config.get_text_config().hidden_size
        return size

    @property
    def num_aux_layers(self) -> int:
        """The number of layers whose outputs `forward` can return as `aux_layers`."""
        return 0 if self.is_recurrent else len(self.model.get_decoder().layers)

    @property
    def vocab_size(self) -> int:
        size: int = self.model.get_output_embeddings().weight.shape[0]
        return size

    @property
    def max_position_embeddings(self) -> int | None:
        """The number of positions in the model's config."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def has_mtp(self) -> bool:
        return self.mtp_layer is not None

    @property
    def is_recurrent(self) -> bool:
        return self._states is not None

    @property
    def selects_keys(self) -> bool:
        """Whether indexers select the keys that attention reads."""
        return len(self._indexers) > 0  # `bool` of a list is what Dynamo 2.11 cannot trace

    def fits_its_caches(self) -> bool:
        """Whether the weights still have the dtype, device and vocabulary of `prepare`."""
        has_caches = next(iter(self._trunk.latent.values())).kv_cache is not None
        is_same = (
            self.vocab_size == self._prepared_vocab and _kind(_up_projection(self._trunk)) == self._prepared
        )
        return has_caches and is_same

    def hooks(self) -> list[int]:
        """The forward hooks of all modules, each by the number of its handle. Compiled steps have those of the first
        call: torch guards on no hook."""
        modules = list(self.modules())
        return [
            number for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks) for number in hooks
        ]

    def prepare(self, num_pages: int) -> None:
        """Move the MTP layer and rotary frequencies to the weights' device, and drop recurrent states."""
        weight = _up_projection(self._trunk)
        self._prepared, self._prepared_vocab = _kind(weight), self.vocab_size
        layer, cache = self.mtp_layer, self._mtp
        if layer is not None and cache is not None and _kind(_up_projection(cache)) != self._prepared:
            layer.to(weight.device, weight.dtype)  # `model.to` does not reach it
        self._rope = FixedRope(self.model)
        if self._states is not None:
            self._states.allocate(num_pages)

    def cache_specs(self) -> list[CacheSpec]:
        specs = self._trunk.specs("layers.{}.self_attn", "target")
        return specs + ([] if self._mtp is None else self._mtp.specs("mtp.layer.self_attn", "drafter", 1))

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: MLABatch, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        if self._states is not None:
            return ForwardOutput(self._states.forward(self._run, token_ids, positions, batch))
        self._outputs = dict.fromkeys(aux_layers)
        hidden = self._run(token_ids[None], positions[None], batch)[0]
        aux = tuple(self._outputs[i][0] for i in aux_layers)
        self._outputs = {}  # else they would stay in memory, and a compiled graph would return them
        return ForwardOutput(hidden, aux)

    def _run(self, input_ids: Tensor, position_ids: Tensor, batch: MLABatch) -> Tensor:
        """`[rows, tokens]` to hidden states `[rows, tokens, hidden_size]`; `batch` has the tokens row by row."""
        self._trunk.batch = batch
        mask = self._mask(input_ids)
        out = self.model.get_decoder()(
            input_ids=input_ids,
            attention_mask=None if mask is None else {"indexed_attention": mask},
            position_ids=position_ids,
            past_key_values=self._trunk,
            use_cache=True,
        )
        self._trunk.batch = None
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _mask(self, like: Tensor) -> Tensor | None:
        """A mask that attention with an indexer slices before it passes it on; nothing reads it."""
        return like.new_ones(1, 1, 1, 1, dtype=torch.bool) if self.selects_keys else None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids `[tokens]`, int64, to their embeddings `[tokens, hidden_size]`."""
        embedded: Tensor = self.model.get_input_embeddings()(token_ids[None])
        return embedded[0]

    def logits(self, hidden: Tensor) -> Tensor:
        # MiniCPM3 scales before its head.
        scale = getattr(self.model.config.get_text_config(), "logits_scaling", 1)
        logits: Tensor = self.model.get_output_embeddings()(hidden if scale == 1 else hidden / scale)
        return logits

    def forward_mtp(
        self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch
    ) -> Tensor:
        assert self.mtp_layer is not None
        assert self._mtp is not None
        embeds = self.model.get_input_embeddings()(next_token_ids[None])
        # In transformers, an MTP position is that of its input token, which is the next one.
        position_ids = positions[None] + 1
        self._mtp.batch = batch
        out: Tensor = self.mtp_layer(
            embeds,
            hidden[None],
            position_embeddings=self.model.get_decoder().rotary_emb(embeds, position_ids=position_ids),
            attention_mask=self._mask(next_token_ids),
            position_ids=position_ids,
            past_key_values=self._mtp,
        )
        self._mtp.batch = None
        return out[0]

    def _keep_output(self, i: int, layer: nn.Module, inputs: object, output: Any) -> None:
        if i in self._outputs:
            self._outputs[i] = output if isinstance(output, Tensor) else output[0]

    @contextmanager
    def installed(self, longest: int) -> Iterator[None]:
        """Replace transformers' attention and experts within the context.

        longest: tokens of the longest row, prompt and generation together.
        """
        check_model(self.model)  # adapters may have been added
        if not set(map(id, _parts(self.model))) <= set(map(id, self._parts)):
            hint = "call accelerate again after layers are replaced"
            raise MLAError("model", "the layers that `accelerate` found", "others in their place", hint)
        with ExitStack() as stack:
            for cache in (self._trunk, self._mtp):
                for layer in () if cache is None else cache.latent.values():
                    vars(layer.attention)["mla_layer"] = layer
                    stack.callback(delattr, layer.attention, "mla_layer")
            self._rope.fix(longest, stack)
            for layer, hook in self._hooks:
                stack.enter_context(layer.register_forward_hook(hook))
            for config in self._configs:
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = ATTENTION
            for module, forward in (*self._experts, *self._indexers):
                if "forward" not in vars(module):  # else other code has set it
                    module.forward = forward
                    stack.callback(delattr, module, "forward")
            yield


def _parts(model: Any) -> list[Any]:
    """The modules that a target prepares once: layers, their attention, and its indexers."""
    attention = attention_layers(model)
    indexers = [getattr(layer, "indexer", None) for layer in attention]
    return [*model.get_decoder().layers, *attention, *indexers]


def _hidden_of_block(_module: nn.Module, _inputs: object, output: Any) -> Any:
    """GLM-5's layers return their selection of keys too, which `MtpLayer` does not expect."""
    return output[0] if isinstance(output, tuple) else output


def _up_projection(cache: PagedLatentCache) -> Tensor:
    """The weight that determines a cache's dtype and device."""
    weight: Tensor = next(iter(cache.latent.values())).attention.kv_b_proj.weight
    return weight


def _kind(x: Tensor) -> tuple[torch.dtype, torch.device]:
    return x.dtype, x.device


def check_model(model: Any) -> None:
    """Raises `MLAError` for a model that `TransformersTarget` cannot run correctly."""
    if not hasattr(model, "get_decoder") or not (layers := attention_layers(model)):
        hint = "docs/transformers.md lists the families"
        raise MLAError("model", "a transformers model with MLA attention", type(model).__name__, hint)
    _check_whole(model)
    indexers = [layer.indexer for layer in layers if getattr(layer, "indexer", None) is not None]
    unknown = {type(each).__name__ for each in indexers} - INDEXERS.keys()
    if unknown:
        got = f"{type(model).__name__}, whose {', '.join(sorted(unknown))} selects the keys of each token"
        expected = f"a model without an indexer, or with one of {', '.join(INDEXERS)}"
        raise MLAError("model", expected, got, "docs/transformers.md lists the families")
    numbers = tuple(map(int, transformers.__version__.split(".")[:2]))
    if indexers and numbers < (5, 18):  # those cached keys and values of each head
        got = f"{type(model).__name__} of transformers {transformers.__version__}"
        hint = "install a newer transformers, or use mla_compile.load_model"
        raise MLAError("model", "a model with an indexer of transformers 5.18 or newer", got, hint)
    if model.get_output_embeddings() is None:
        hint = "load it with AutoModelForCausalLM"
        raise MLAError("model", "a model with a language-model head", type(model).__name__, hint)
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise MLAError("model", "all parameters on one device", ", ".join(sorted(devices)))
    if model.training:
        raise MLAError("model", "a model in evaluation mode", "one in training mode", "call model.eval()")
    if model._forward_hooks or model._forward_pre_hooks:
        hint = "remove them: the engine calls the decoder and the head"
        raise MLAError(
            "model", "a model without hooks of its own, as its forward is not called", "hooks", hint
        )
    _check_experts(model)
    for layer in layers:
        up = layer.kv_b_proj
        if type(up) is not nn.Linear or not up.weight.is_floating_point() or "bias" in up.state_dict():
            expected = "kv_b_proj to be a plain floating-point torch.nn.Linear without bias"
            hint = "merge adapters and dequantise first: attention reads its weight"
            raise MLAError("model", expected, up, hint)
        if up._forward_hooks or up._forward_pre_hooks:
            raise MLAError(
                "model", "kv_b_proj without hooks, as its forward is not called", "hooks", "remove them"
            )


def _check_experts(model: Any) -> None:
    """Raises `MLAError` for active adapters on experts: PEFT's layer replaces the stacked weights in each call, which
    Dynamo cannot trace."""
    for name, module in model.named_modules():
        if "base_layer" not in module._modules or not any(map(has_our_experts, module.modules())):
            continue
        if not (getattr(module, "merged", False) or getattr(module, "disable_adapters", False)):
            got, hint = f"{type(module).__name__} at {name}", "merge adapters first, or disable them"
            raise MLAError("model", "experts without active adapters", got, hint)


def _check_whole(model: Any) -> None:
    """Raises `MLAError` for a model that is divided among processes."""
    # Loading sets the mesh of a model that it divides; every model has a plan.
    divided = getattr(model, "_device_mesh", None) is not None
    if divided or any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):  # DTensors
        got = f"{type(model).__name__} divided among processes"
        hint = "load it on one GPU, without tp_plan and distributed_config; or use load_model"
        raise MLAError("model", "a model that is whole in this process", got, hint)
