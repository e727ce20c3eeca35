"""Loads Hugging Face checkpoints. transformers is imported only when a checkpoint is loaded."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from mla_compile.defaults import default_dtype
from mla_compile.errors import MLAError, first_line
from mla_compile.hub import download_hint, find_checkpoint
from mla_compile.models import fp8
from mla_compile.models.architecture import SAME_AS, WRAPPERS, Architecture
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.files import MAX_CONFIG, read_object
from mla_compile.models.generation_config import read_generation_config
from mla_compile.models.layout import pack_adjacent
from mla_compile.models.names import (
    destinations,
    layers_of,
    layers_past_trunk,
    num_separate_experts,
    parts,
    shared_copies,
)
from mla_compile.models.parallel import Parallel, check_parallel
from mla_compile.models.safetensor_files import FLOAT8, FLOATS, Entry, SafetensorFiles
from mla_compile.models.settings import ROPE_SETTINGS, SETTINGS, check_settings
from mla_compile.models.sharding import check_divisible, divide
from mla_compile.models.weight_loader import WeightLoader
from mla_compile.ops.collectives.peers import connect
from mla_compile.ops.linear.fp8 import BLOCK, scale_shape
from mla_compile.progress import announce_if_slow

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CONFIG = "config.json"
_FLOAT8_SCALE = "F8_E8M0"  # safetensors' name
_LISTED = 8  # tensors named per kind of mistake
_TRUNK_ALONE = "the trunk alone is loaded with mtp=False (generate: --num-speculative-tokens 0)"


class CheckpointConfig(NamedTuple):
    """A checkpoint's config, the FP8 block of its weights (None if they are not FP8), and its tensors' prefix."""

    config: "PreTrainedConfig"
    block: tuple[int, int] | None
    prefix: str


@dataclass(frozen=True)
class LoadSettings:
    """The arguments of `load_model` that decide what is loaded: see there."""

    mtp: bool | None = None
    quantize: Literal["fp8"] | None = None
    dequantize: bool = False
    generation_config: Literal["auto", "none"] = "auto"


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    mtp: bool | None = None,
    quantize: Literal["fp8"] | None = None,
    dequantize: bool = False,
    generation_config: Literal["auto", "none"] = "auto",
    parallel: Parallel | None = None,
) -> MLAForCausalLM:
    """Load a checkpoint of a family of docs/checkpoints.md: `config.json` and safetensors files.

    Of Kimi-K2.5 and its successors (`kimi_k25`) the text model is loaded, and images are not supported.

    FP8 weights with a scale for each block of 128 x 128 stay FP8; those with other blocks are dequantised. The config
    is checked before any other file is opened, and every tensor by its header before the first one is read.
    docs/checkpoints.md says what loading a checkpoint may do.

    Args:
        path: the checkpoint's directory, or ORG/NAME of a model in the local Hugging Face cache.
        dtype: of weights, except FP8 ones, and of the computation; the routers' correction biases stay float32. None:
            bfloat16 on a GPU, float32 elsewhere.
        device: of the weights, which are moved one at a time.
        mtp: whether to have the MTP layer; None: if the checkpoint holds its tensors, regardless of its config.
        quantize: "fp8": quantise linear layers and experts to FP8. Embedding, head, `kv_b_proj`, routers and the MTP
            layer's `eh_proj` stay in `dtype`; an FP8 checkpoint stays as it is.
        dequantize: convert all weights to `dtype`.
        generation_config: "auto": the model's `default_sampling` and `stop_ids`, which requests without their own use,
            are those of `generation_config.json`. "none": that file is ignored: greedy, and the config's
            end-of-sequence ids.
        parallel: load the part of one of several processes that share the model; see docs/parallel.md. Only that part
            of each divided tensor is read, or the blocks that overlap it if it is dequantised. An error in one process
            is an error in all.

    Raises:
        MLAError: a missing or unreadable file, an unsupported config or quantisation, a bad sampling parameter, missing
            or extra or misshapen tensors (all in one error), several MTP layers, or none with `mtp=True`; a dtype that
            is not floating, a device that this machine lacks; another `quantize`, or `dequantize` with it; another
            `generation_config`; a number of processes that the model cannot be divided among, or a `parallel` that is
            not this process's.
    """
    if parallel is not None:
        check_parallel(parallel)
    together = nullcontext if parallel is None else parallel.failing_together
    is_shown = parallel is None or parallel.rank == 0
    with together():
        _check_target(dtype, device)
        dtype = dtype or default_dtype(device)
    settings = LoadSettings(mtp, quantize, dequantize, generation_config)
    with announce_if_slow("opening the checkpoint", is_shown=is_shown), together():
        model, files, block = open_checkpoint(path, settings, dtype=dtype, parallel=parallel)
    with together():
        model.to_empty(device=device)
        pack_adjacent(model)  # before the weights have values
        loader = WeightLoader(model, files, block, device)
        with announce_if_slow("loading the checkpoint", loader.num_bytes, is_shown=is_shown) as advance:
            loader.run(advance)
    if parallel is not None and parallel.ranks is not None:
        try:
            connect(model.device)  # before any step is compiled or recorded
        except Exception:
            parallel.ranks.fail()  # the others may wait for this one in `connect`
            raise
    return model.eval()


def meta_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    mtp: bool | None = None,
    quantize: Literal["fp8"] | None = None,
    dequantize: bool = False,
) -> MLAForCausalLM:
    """The model that `load_model` builds, on the meta device; only config.json is read.

    For an FP8 checkpoint it assumes that the same weights are FP8 as in all published ones.

    path, dtype, quantize, dequantize: see `load_model`. mtp: None: if the config has an MTP layer.

    Raises:
        MLAError: as `load_model` for the config and these arguments.
    """
    config, block, _ = read_config(find_checkpoint(path))
    _check_quantize(quantize, dequantize, block)
    with torch.device("meta"):
        has_mtp = bool(getattr(config, "num_nextn_predict_layers", 0)) if mtp is None else mtp
        model = MLAForCausalLM(config, mtp=has_mtp).to(dtype)
    if quantize is not None or (block == (BLOCK, BLOCK) and not dequantize):
        fp8.put_fp8_layers(model, lambda name: "eh_proj" not in name)
    return model


def open_checkpoint(
    path: str | Path, settings: LoadSettings, *, dtype: torch.dtype, parallel: Parallel | None = None
) -> tuple[MLAForCausalLM, SafetensorFiles, tuple[int, int] | None]:
    """The model that `load_model` fills, still on the meta device, its files, and the FP8 block of their weights.

    It makes all checks of files that `load_model` documents.
    """
    directory, mtp = find_checkpoint(path), settings.mtp
    config, block, prefix = read_config(directory)
    _check_quantize(settings.quantize, settings.dequantize, block)
    sampling, stop_ids = read_generation_config(directory, config, settings.generation_config)
    files = SafetensorFiles(directory, prefix)
    _check_layers(config, files, directory)
    if mtp is not None and type(mtp) is not bool:
        raise MLAError("mtp", "True, False or None", f"{mtp!r:.80}")
    if mtp is not False:
        mtp = _has_mtp(files, config, directory, wanted=mtp)
    if config.tie_word_embeddings and _has_own_head(files, config):
        config.tie_word_embeddings = False  # as transformers 5 does
    with torch.device("meta"):
        model = MLAForCausalLM(config, mtp=mtp).to(dtype)
    model.default_sampling, model.stop_ids = sampling, stop_ids
    _check(model, files, directory, block)

    def is_fp8(name: str) -> bool:
        """Whether a parameter becomes FP8, or is FP8 in the checkpoint with blocks that ops support."""
        parameter = model.get_parameter(name)
        read = parts(name, parameter, model.arch.num_layers, files.entries)
        in_fp8 = [files.entries[part].dtype == FLOAT8 for part in read]
        if not any(in_fp8):
            return settings.quantize is not None and "eh_proj" not in name
        if block != (BLOCK, BLOCK) or not all(in_fp8):
            return False
        # If gate and up are one tensor, a block must not span both.
        return not any(part.endswith("gate_up_proj") and parameter.shape[1] // 2 % BLOCK for part in read)

    if not settings.dequantize:
        fp8.put_fp8_layers(model, is_fp8)
    if parallel is not None:
        check_divisible(
            model, parallel.size, expert_parallel=parallel.expert_parallel, argument="parallel.size"
        )
        divide(model, parallel)
    return model, files, block


def read_config(directory: Path) -> CheckpointConfig:
    """A checkpoint's config, checked.

    Raises:
        MLAError: no directory, no config, or a bad setting, with the file and the setting named.
    """
    file = directory / CONFIG
    raw = raw_config(directory, "a checkpoint's config", "use a directory in Hugging Face format")
    prefix, model_type, known_types = f"{file}: ", raw.get("model_type"), (*SAME_AS, *WRAPPERS)
    of_tensors = ""
    if isinstance(model_type, str) and model_type in WRAPPERS:
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise MLAError(f"{prefix}text_config", "an object", f"{text!r:.80}")
        outer = {name: raw[name] for name in fp8.QUANTIZATION if name in raw}
        raw, prefix, known_types = outer | text, f"{prefix}text_config.", tuple(SAME_AS)
        of_tensors, model_type = WRAPPERS[model_type], raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in SAME_AS:
        raise MLAError(f"{prefix}model_type", "one of " + ", ".join(known_types), f"{model_type!r:.80}")
    check_settings(raw, SETTINGS, prefix)
    block = fp8.block_size_of(raw, prefix)
    # transformers' DeepSeek-V3 has an MTP layer by default.
    known: dict[str, Any] = {"num_nextn_predict_layers": 0}
    known |= {name: raw[name] for name in SETTINGS if name in raw} | rope_settings(raw, prefix)
    # transformers requires a Python float, and JSON may have 1.
    known |= {name: float(known[name]) for name in ("rms_norm_eps", "routed_scaling_factor") if name in known}
    if known.get("num_key_value_heads") is None and "num_attention_heads" in known:
        # MLA has as many; transformers' default differs.
        known["num_key_value_heads"] = known["num_attention_heads"]
    config = transformers_config(SAME_AS[model_type], known, file)
    Architecture.from_config(config, prefix)
    return CheckpointConfig(config, block, of_tensors)


def raw_config(directory: Path, expected: str, hint: str) -> dict[str, Any]:
    """The settings in a config.json. expected, hint: of the `MLAError` if there is none."""
    raw = read_object(directory, CONFIG, most=MAX_CONFIG) if directory.is_dir() else None
    if raw is None:
        got = "none" if directory.is_dir() else "no such directory"
        raise MLAError(str(directory / CONFIG), expected, got, download_hint(directory, hint))
    return raw


def rope_settings(raw: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The rotary settings of a config.json, in the form of transformers 5."""
    top: dict[str, Any] = {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in raw}
    original = "original_max_position_embeddings"
    if raw.get(original) is not None:  # transformers prefers it to the table's
        top[original] = raw[original]
    check_settings(top, ROPE_SETTINGS, prefix)
    for key in ("rope_scaling", "rope_parameters"):  # the first has precedence
        table = raw.get(key)
        if table is not None and not isinstance(table, dict):
            raise MLAError(f"{prefix}{key}", "an object, or null", f"{table!r:.80}")
        if table:
            check_settings(table, ROPE_SETTINGS, f"{prefix}{key}.")
            return top | {"rope_parameters": {name: table[name] for name in ROPE_SETTINGS if name in table}}
    return top


def transformers_config(model_type: str, settings: dict[str, Any], file: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        # Transformers' own class, and only these settings: others could make it read other files or run code.
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # its validators raise many classes, all about the file's contents
        raise MLAError(str(file), "values that transformers accepts", first_line(error)) from error
    return config


def _check_target(dtype: torch.dtype | None, device: str | torch.device) -> None:
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        expected = "a float dtype: float16, bfloat16, float32 or float64"
        raise MLAError("dtype", expected, f"{dtype!r:.80}", "for example torch.bfloat16")
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError, TypeError) as error:  # torch asserts that it was compiled with CUDA
        raise MLAError("device", "a device of this machine", device, first_line(error)) from error


def _check_quantize(quantize: object, dequantize: object, block: tuple[int, int] | None) -> None:
    if quantize not in (None, "fp8"):
        raise MLAError("quantize", "'fp8' or None", f"{quantize!r:.80}")
    if type(dequantize) is not bool:
        raise MLAError("dequantize", "True or False", f"{dequantize!r:.80}")
    if quantize is not None and dequantize:
        raise MLAError("quantize, dequantize", "one of the two", "both", "leave one out")
    if quantize is not None and block not in (None, (BLOCK, BLOCK)):
        hint = "leave it out, and they are dequantised"
        raise MLAError("quantize", f"weights without FP8, or FP8 in blocks of {BLOCK} x {BLOCK}", block, hint)


def _check_layers(config: "PreTrainedConfig", files: SafetensorFiles, directory: Path) -> None:
    """Check, before a layer is built, that the files have tensors of each."""
    held = layers_of(files.entries)
    if files.entries and not held:
        hint = "save the language model itself, without a wrapper, by ...ForCausalLM.save_pretrained"
        got = f"{next(iter(files.entries))!r:.80}"
        raise MLAError(str(directory), "tensors named model.layers.0. and so on", got, hint)
    missing = next((layer for layer in range(config.num_hidden_layers) if layer not in held), None)
    if missing is not None:
        expected = f"the number of layers in the safetensors files, which have no tensor of layer {missing}"
        raise MLAError(f"{directory / CONFIG}: num_hidden_layers", expected, config.num_hidden_layers)


def _has_mtp(
    files: SafetensorFiles, config: "PreTrainedConfig", directory: Path, *, wanted: bool | None
) -> bool:
    layers = layers_past_trunk(files.entries, config.num_hidden_layers)
    if len(layers) > 1:
        got = f"{len(layers)}: layers {layers[0]} to {layers[-1]}, after num_hidden_layers = {config.num_hidden_layers}"
        raise MLAError(str(directory), "at most one MTP layer", got, _TRUNK_ALONE)
    if wanted and not layers:
        expected = f"an MTP layer (tensors model.layers.{config.num_hidden_layers}.*)"
        raise MLAError(str(directory), expected, "none", _TRUNK_ALONE)
    return bool(layers)


def _has_own_head(files: SafetensorFiles, config: "PreTrainedConfig") -> bool:
    """Whether the files hold a head that is not a copy of the embedding."""
    names = "lm_head.weight", "model.embed_tokens.weight"
    head, embedding = (files.entries.get(name) for name in names)
    if head is None or embedding is None:
        return head is not None
    # No tensors of other sizes are read, which may be those of a hostile header.
    has_size = head.shape == embedding.shape == (config.vocab_size, config.hidden_size)
    may_be_copy = has_size and head.dtype == embedding.dtype and head.dtype in FLOATS
    return not (may_be_copy and torch.equal(*map(files.read, names)))


def _check(
    model: MLAForCausalLM, files: SafetensorFiles, directory: Path, block: tuple[int, int] | None
) -> None:
    """Compare a checkpoint's headers with the tensors of the model (on the meta device)."""
    experts = num_separate_experts(model, files.entries)
    # Each has three tensors, and a hostile config could make listing them take for ever.
    if experts > len(files.entries):
        expected = f"at most as many experts as the files have tensors, {len(files.entries)}"
        got = f"{model.arch.routing.num_experts} in each of its layers"
        raise MLAError(f"{directory / CONFIG}: n_routed_experts", expected, got)
    required = {name: tuple(place.shape) for name, (place, _) in destinations(model, files.entries).items()}
    quantized = [
        name
        for name, shape in required.items()
        if (entry := files.entries.get(name))
        and entry.dtype == FLOAT8
        and entry.shape == shape
        and len(shape) > 1
    ]
    if quantized and block is None:
        expected = "quantization_config with weight_block_size, as some tensors are float8"
        raise MLAError(str(directory / CONFIG), expected, "none")
    if block is not None:
        required |= {n + fp8.SCALE_SUFFIX: scale_shape(required[n], block) for n in quantized}

    def is_unwanted(name: str) -> bool:
        past_trunk = model.mtp is None and layers_past_trunk([name], model.arch.num_layers)
        return bool(past_trunk) or name.endswith(".rotary_emb.inv_freq")

    entries = {name: entry for name, entry in files.entries.items() if not is_unwanted(name)}
    expected = f"the tensors of its {model.config.model_type} config"
    check_tensors(directory, entries, required, shared_copies(model), expected=expected)


def check_tensors(
    directory: Path,
    entries: dict[str, Entry],
    required: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
    *,
    expected: str,
    may_be_fp8: bool = True,
) -> None:
    """Raises one `MLAError` for all tensors that are missing, extra, misshapen or not floating.

    required, optional: shapes by name. may_be_fp8: whether matrices may be FP8.
    """
    known = required | optional
    missing = [f"{name} {list(shape)}" for name, shape in required.items() if name not in entries]
    extra, misshapen = [], []
    for name, entry in entries.items():
        if name not in known:
            extra.append(f"{name} {entry}")
        elif entry.shape != known[name] or entry.dtype not in _accepted_dtypes(name, known[name], may_be_fp8):
            misshapen.append(f"{name} (float {list(known[name])} expected, {entry} found)")
    mistakes = [
        f"{len(names)} {kind}: {_shorten(names)}"
        for kind, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if names
    ]
    if mistakes:
        raise MLAError(str(directory), expected, "; ".join(mistakes))


def _accepted_dtypes(name: str, shape: tuple[int, ...], may_be_fp8: bool) -> tuple[str, ...]:
    if name.endswith(fp8.SCALE_SUFFIX):
        return (*FLOATS, _FLOAT8_SCALE)
    return (*FLOATS, FLOAT8) if may_be_fp8 and len(shape) > 1 else FLOATS


def _shorten(names: list[str]) -> str:
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return ", ".join(names[:_LISTED] + more)
