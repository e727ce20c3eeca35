"""The MTP layer of a transformers model, loaded by transformers, or LongCat-Flash's, which transformers lacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.longcat_flash.modeling_longcat_flash import (
    LongcatFlashForCausalLM,
    LongcatFlashMLA,
    LongcatFlashMLP,
    LongcatFlashRMSNorm,
)

from mla_compile.errors import MLAError
from mla_compile.models.safetensor_files import FLOATS, SafetensorFiles
from mla_compile.speculate.drafter import ANY_MODEL


class MissingMtpLayer(MLAError):
    """A model's config names an MTP layer whose weights cannot be found, or several layers."""


class LongcatMtpLayer(nn.Module):
    """LongCat-Flash's MTP layer: one attention and one dense MLP where a trunk layer has two of each and experts.

    The computation is that of vLLM's `longcat_flash_mtp`; the call is that of transformers' `MtpLayer`.
    """

    def __init__(self, model: LongcatFlashForCausalLM) -> None:
        """Random weights, in the model's dtype and on its device."""
        super().__init__()
        config = model.config

        def norm() -> LongcatFlashRMSNorm:
            return LongcatFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = LongcatFlashMLA(config, layer_idx=0)
        self.mlp = LongcatFlashMLP(config)
        self.norm = norm()
        self.to(model.device, model.dtype).eval()

    @classmethod
    def from_pretrained(cls, model: LongcatFlashForCausalLM) -> "LongcatMtpLayer":
        """Load the layer from `model.mtp` of the model's checkpoint. Raises `MissingMtpLayer` if it is not there."""
        layer = cls(model)
        files = SafetensorFiles(_directory(model))
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                published = _published_name(name)
                if published not in files.entries:
                    hint = "or load a checkpoint with the MTP layer's weights"
                    expected = f"{ANY_MODEL!r} for a checkpoint without {published}"
                    raise MissingMtpLayer("drafter", expected, "'mtp'", hint)
                entry = files.entries[published]
                if entry.shape != parameter.shape or entry.dtype not in FLOATS:
                    raise MLAError(published, f"float {list(parameter.shape)}", entry)
                parameter.copy_(files.read(published))
        files.check_unchanged()
        return layer

    def forward(
        self,
        inputs_embeds: Tensor,
        previous_hidden_state: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Any,
    ) -> Tensor:
        """All `[batch, tokens, hidden_size]`; returns hidden states after the layer's final norm."""
        joined = torch.cat([self.enorm(inputs_embeds), self.hnorm(previous_hidden_state)], dim=-1)
        hidden = self.eh_proj(joined)
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        hidden = hidden + attended
        out: Tensor = self.norm(hidden + self.mlp(self.post_attention_layernorm(hidden)))
        return out


def _directory(model: PreTrainedModel) -> Path:
    """The checkpoint that the model was loaded from: a directory, or a snapshot in the Hugging Face cache.

    Raises:
        MissingMtpLayer: it is not on this machine. Nothing is downloaded.
    """
    path: Any = model.config.name_or_path
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache; not the name of a repository
        expected = "a model whose checkpoint, with its MTP layer, is on this machine"
        raise MissingMtpLayer(
            "mtp", expected, path, f"give the layer as mtp, or drafter={ANY_MODEL!r}"
        ) from error


def _published_name(ours: str) -> str:
    if ours == "norm.weight":
        return "model.mtp.norm.weight"
    if ours in ("enorm.weight", "hnorm.weight"):
        ours = ours.replace("norm.", "norm.m.")
    elif ours.startswith("mlp."):
        ours = f"transformer_layer.{ours}"
    return f"model.mtp.layers.0.{ours}"


def mtp_layer(model: PreTrainedModel, mtp: nn.Module | None) -> nn.Module | None:
    """The MTP layer that drafts: from `mtp`, or from the checkpoint that the model was loaded from.

    mtp: a `MtpModel` or a `LongcatMtpLayer`.

    Returns None if the model's config names none.

    Raises:
        MissingMtpLayer: the config names one that cannot be found, or several.
        MLAError: `mtp` is neither, or has several layers.
    """
    if mtp is None:
        if _num_mtp_layers(model) == 0:
            return None
        if not model.config.name_or_path:
            expected = "a model loaded from a checkpoint that has its MTP layer"
            hint = f"give the layer as mtp, or drafter={ANY_MODEL!r}"
            raise MissingMtpLayer("mtp", expected, "a model without a checkpoint", hint)
        mtp = _load(model)
    if isinstance(mtp, LongcatMtpLayer):
        return mtp
    if not isinstance(mtp, MtpModel):
        raise MLAError("mtp", "a transformers MtpModel or a LongcatMtpLayer", type(mtp).__name__)
    if mtp.num_mtp_layers != 1:
        raise MLAError("mtp", "one MTP layer, which can draft several tokens", mtp.num_mtp_layers)
    layer: nn.Module = mtp.layers[0]
    return layer


def _num_mtp_layers(model: PreTrainedModel) -> int:
    """The number in the config; LongCat-Flash models have one, which their configs omit."""
    if isinstance(model, LongcatFlashForCausalLM):
        return 1
    config = model.config.get_text_config()
    return getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None) or 0


def _load(model: PreTrainedModel) -> nn.Module:
    if isinstance(model, LongcatFlashForCausalLM):
        return LongcatMtpLayer.from_pretrained(model)
    count = _num_mtp_layers(model)
    if count != 1:
        expected = f"{ANY_MODEL!r} for a model with several MTP layers"
        raise MissingMtpLayer("drafter", expected, f"'mtp', and {count} layers")
    directory = _directory(model)
    SafetensorFiles(directory)  # rejects files outside of it, which transformers would read
    try:
        with _mtp_known(model, directory):
            loaded: nn.Module = MtpModel.from_pretrained(model, device_map={"": model.device})
    except RuntimeError as error:
        expected = f"{ANY_MODEL!r} for a checkpoint without all weights of its MTP layer ({model.config.name_or_path})"
        raise MissingMtpLayer("drafter", expected, error) from error
    return loaded.eval()


@contextmanager
def _mtp_known(model: PreTrainedModel, directory: Path) -> Iterator[None]:
    """Set what `MtpModel.from_pretrained` needs of a model and its config may lack, and the checkpoint's directory.

    `from_pretrained` also assumes the published models' 61 or 47 layers: this sets the model's own number.
    """
    config: Any = model.config.get_text_config()
    name_or_path = model.config.name_or_path
    fields: dict[str, Any] = {"num_mtp_layers": 1}
    if hasattr(config, "mlp_layer_types"):
        fields["mtp_mlp_layer_types"] = ["sparse"]
    if getattr(config, "layer_types", None):
        fields["mtp_layer_types"] = config.layer_types[-1:]
    missing = {name: value for name, value in fields.items() if getattr(config, name, None) is None}
    patterns = vars(model).get("_keys_to_ignore_on_load_unexpected")
    try:
        for name, value in missing.items():
            setattr(config, name, value)
        model.config.name_or_path = str(directory)  # a hub name would cause a network request
        model._keys_to_ignore_on_load_unexpected = {rf"model\.layers\.{config.num_hidden_layers}\."}
        yield
    finally:
        model.config.name_or_path = name_or_path
        del model._keys_to_ignore_on_load_unexpected
        if patterns is not None:
            model._keys_to_ignore_on_load_unexpected = patterns
        for name in missing:
            delattr(config, name)
