"""Which model types of the installed transformers have MLA, and which of them run.

    python -m benchmarks.families --output benchmarks/results/families.json

A model type has MLA if its attention expands latents (`expand_kv`), or if its text model's does. Each one is built with
its published sizes, without memory, and checked as `accelerate` checks it. The tests of `tests/integrations` compare
those that run with transformers.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationMixin, PreTrainedModel

from benchmarks.reporting import add_row, command_parser
from mla_compile import MLAError
from mla_compile.integrations.transformers.target import check_model
from mla_compile.models.architecture import SAME_AS, WRAPPERS

_MODELS = Path(transformers.__file__).parent / "models"


def mla_types() -> Iterator[str]:
    """The model types with MLA, those of text models first."""
    has_mla = [
        path.parent.name
        for path in sorted(_MODELS.glob("*/modeling_*.py"))
        if "def expand_kv" in path.read_text()
    ]
    yield from has_mla
    mentions = re.compile("|".join(f'"{name}"' for name in has_mla))
    for path in sorted(_MODELS.glob("*/configuration_*.py")):
        name = path.parent.name
        if name in has_mla or name == "auto" or not mentions.search(path.read_text()):
            continue
        if AutoConfig.for_model(name).get_text_config().model_type in has_mla:
            yield name


def meta_model(model_type: str) -> PreTrainedModel:
    """The model that generates text, on the meta device."""
    config = AutoConfig.for_model(model_type)
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    (build,) = (
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, GenerationMixin)
        and issubclass(found, PreTrainedModel)
        and found.config_class is type(config)
    )
    with torch.device("meta"):
        model: PreTrainedModel = build(config)
    return model.eval()


def families() -> Iterator[dict[str, Any]]:
    """For each type whether `load_model` and `accelerate` take it, and why not."""
    for model_type in mla_types():
        refusal = None
        try:
            check_model(meta_model(model_type))
        except MLAError as error:
            refusal = error.got
        loads = model_type in SAME_AS or model_type in WRAPPERS
        yield {
            "model_type": model_type,
            "load_model": loads,
            "accelerate": refusal is None,
            "refused": refusal,
        }


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"transformers": transformers.__version__, "rows": []}
    for row in families():
        add_row(report, row, args.output)


if __name__ == "__main__":
    main()
