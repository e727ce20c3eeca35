"""Loading Hugging Face checkpoints. transformers is imported here, when a checkpoint is loaded, and not before."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mla_compile.errors import MLAError
from mla_compile.models import fp8
from mla_compile.models.architecture import MODEL_TYPES
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.names import is_past_trunk, layers_past_trunk, shared_copies, slots
from mla_compile.models.safetensor_files import SafetensorFiles
from mla_compile.waits import told

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_FLOATS = ("F64", "F32", "F16", "BF16")  # in safetensors' words
_FLOAT8 = "F8_E4M3"
_FLOAT8_SCALE = "F8_E8M0"
_LISTED = 8  # tensors named per kind of mistake


@told("loading the checkpoint")
def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    mtp: bool | None = None,
) -> MLAForCausalLM:
    """Load a DeepSeek-V2, DeepSeek-V3 or GLM-4 MoE Lite checkpoint: `config.json` and safetensors files.

    Block-FP8 weights are dequantised. Every tensor is checked by its header before the first one is read.

    Args:
        path: the checkpoint's directory.
        dtype: what weights are converted to; the routers' correction biases stay float32.
        device: where they go, one at a time.
        mtp: whether to have the MTP layer; None: where the checkpoint holds its tensors, whatever its config says.

    Raises:
        MLAError: a missing or unreadable file, an unsupported config or quantisation, missing, extra or misshapen
            tensors (all in one error), several MTP layers, or none where `mtp` asks for one; a dtype that is not
            floating, a device that this machine lacks.
    """
    directory = Path(path)
    _check_target(dtype, device)
    raw = _read_json(directory)
    block = fp8.block_size_of(raw)
    config = _config(directory)
    files = SafetensorFiles(directory)
    if mtp is not False:
        mtp = _has_mtp(files, config, directory, wanted=mtp)
    with torch.device("meta"):
        model = MLAForCausalLM(config, mtp=mtp)
    _check(model, files, directory, block)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    for name, slot in slots(model, files.entries).items():
        tensor = files.read(name).to(device)
        if block is not None and files.entries[name].dtype == _FLOAT8:
            tensor = fp8.dequantize(tensor, files.read(name + fp8.SCALE_SUFFIX).to(device), block)
        slot.copy_(tensor)
    return model.eval()


@told("loading the tokenizer")
def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase | None":
    """A checkpoint's tokenizer; None where it has none.

    Raises:
        MLAError: tokenizer files that transformers cannot read.
    """
    directory = Path(path)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises bare `Exception` for a malformed file
        raise MLAError(
            str(directory), "a tokenizer that transformers can read", _first_line(error)
        ) from error
    return tokenizer


def _check_target(dtype: torch.dtype, device: str | torch.device) -> None:
    if not dtype.is_floating_point:
        raise MLAError("dtype", "a floating dtype", dtype)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled with CUDA
        raise MLAError("device", "a device of this machine", device, _first_line(error)) from error


def _read_json(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        got = "none" if directory.is_dir() else "no such directory"
        raise MLAError(str(file), "a checkpoint's config", got, "give a directory in Hugging Face format")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MLAError(str(file), "readable JSON", error) from error
    if not isinstance(raw, dict) or raw.get("model_type") not in MODEL_TYPES:
        got = raw.get("model_type", "none") if isinstance(raw, dict) else type(raw).__name__
        raise MLAError(str(file), "a model_type of " + ", ".join(MODEL_TYPES), got)
    return raw


def _config(directory: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        # Published configs name remote code in `auto_map`; transformers' own classes are the ones we read.
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its validators raise many classes, all about the file's contents
        file = str(directory / "config.json")
        raise MLAError(file, "values that transformers accepts", _first_line(error)) from error
    return config


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _has_mtp(
    files: SafetensorFiles, config: "PreTrainedConfig", directory: Path, *, wanted: bool | None
) -> bool:
    layers = layers_past_trunk(files.entries, config.num_hidden_layers)
    if len(layers) > 1:
        got = f"{len(layers)}: layers {layers[0]} to {layers[-1]}, after num_hidden_layers = {config.num_hidden_layers}"
        raise MLAError(str(directory), "at most one MTP layer", got, "pass mtp=False to load the trunk alone")
    if wanted and not layers:
        expected = f"an MTP layer (tensors model.layers.{config.num_hidden_layers}.*)"
        raise MLAError(str(directory), expected, "none", "pass mtp=None or False to load the trunk alone")
    return bool(layers)


def _check(
    model: MLAForCausalLM, files: SafetensorFiles, directory: Path, block: tuple[int, int] | None
) -> None:
    """Compare a checkpoint's headers with what the model (on the meta device) wants."""
    required = {name: tuple(slot.shape) for name, slot in slots(model, files.entries).items()}
    quantized = [
        name
        for name, shape in required.items()
        if (entry := files.entries.get(name)) and entry.dtype == _FLOAT8 and entry.shape == shape
    ]
    if quantized and block is None:
        expected = "quantization_config with weight_block_size, as some tensors are float8"
        raise MLAError(str(directory / "config.json"), expected, "none")
    if block is not None:
        required |= {n + fp8.SCALE_SUFFIX: fp8.scale_shape(required[n], block) for n in quantized}
    known = required | shared_copies(model)
    missing = [f"{name} {list(shape)}" for name, shape in required.items() if name not in files.entries]
    extra, misshapen = [], []
    for name, entry in files.entries.items():
        unwanted = model.mtp is None and is_past_trunk(name, model.arch.num_layers)
        if unwanted or name.endswith(".rotary_emb.inv_freq"):
            continue
        if name not in known:
            extra.append(f"{name} {entry}")
        elif entry.shape != known[name] or entry.dtype not in _accepted_dtypes(name):
            misshapen.append(f"{name} (float {list(known[name])} expected, {entry} found)")
    mistakes = [
        f"{len(names)} {kind}: {_shorten(names)}"
        for kind, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if names
    ]
    if mistakes:
        raise MLAError(
            str(directory), f"the tensors of its {model.config.model_type} config", "; ".join(mistakes)
        )


def _accepted_dtypes(name: str) -> tuple[str, ...]:
    return (*_FLOATS, _FLOAT8_SCALE if name.endswith(fp8.SCALE_SUFFIX) else _FLOAT8)


def _shorten(names: list[str]) -> str:
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return ", ".join(names[:_LISTED] + more)
