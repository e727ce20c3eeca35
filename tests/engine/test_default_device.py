"""What torch's default device is does not matter: tensors are where the model and the arguments are."""

import ast
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mla_compile
from mla_compile import Engine, Grammar, SamplingParams, decode_segment, load_model, prefill_segment
from mla_compile.caches import allocate
from mla_compile.engine.text import SHIPPED_MODEL
from mla_compile.explanation.inspect import inspect_forward
from mla_compile.integrations.transformers import accelerate
from mla_compile.speculate import DecodeState, SpeculativeDecoder
from mla_compile.testing import shadow_check
from mla_compile.torch_internals import capture_graph
from tests.engine.engines import engine
from tests.engine.test_grammar import REGEX, SMALL
from tests.integrations.families import stock_model
from tests.models_for_tests import one_layer_model

FACTORIES = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
    ),
    *(
        "rand",
        "randint",
        "randn",
        "randperm",
        "scalar_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    ),
}
PACKAGE = Path(mla_compile.__file__).parent


@pytest.mark.long
def test_every_tensor_of_the_package_is_made_on_a_device_that_is_named() -> None:
    """But for parameters: modules are built where the caller wants them."""
    unnamed = []
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "models":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            keywords = {keyword.arg for keyword in node.keywords}
            if of_torch and node.func.attr in FACTORIES and "device" not in keywords:
                unnamed.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not unnamed, "give device= here"


PROMPTS = [[1, 2, 3], [4, 5]]
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
LENS, TABLE = torch.tensor([3, 0], dtype=torch.int32), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
MIXED = [SamplingParams(temperature=1.0, frequency_penalty=0.5, logprobs=2), SamplingParams()]
GRAMMAR = Grammar.from_regex(REGEX, SMALL)


def served(**settings: object) -> Engine:
    return engine(2, copy.deepcopy(MODEL), **settings)


def mixed(**settings: object) -> object:
    return served(**settings).generate(PROMPTS, MIXED, max_new_tokens=6)


def checked() -> object:
    with shadow_check(of := served()):
        return of.generate(PROMPTS, MIXED, max_new_tokens=6)


def accelerated(family: str, drafts: int = 0, **kwargs: object) -> object:
    torch.manual_seed(0)
    made = accelerate(copy.deepcopy(STOCK[family]), num_speculative_tokens=drafts, compile=False)
    out = made.generate(IDS, max_new_tokens=4, **kwargs)
    return out.tolist() if isinstance(out, torch.Tensor) else out.sequences.tolist()


MODEL = one_layer_model()
STOCK = {family: stock_model(family) for family in ("deepseek_v2", "kimi_linear")}
USES: dict[str, Callable[[], object]] = {
    "drafts": mixed,
    "look-ups": lambda: mixed(drafter="ngram"),
    "checked": checked,
    "warm_up": lambda: str(served().warm_up().why_not),
    "grammar": lambda: served().generate(PROMPTS, max_new_tokens=6, stop_ids=[0], grammars=GRAMMAR),
    "choose": lambda: [*served().stream(PROMPTS, max_new_tokens=6, choose=lambda x, *_: x.argmax(-1))][-1],
    "generate": lambda: mla_compile.generate(["In"], max_new_tokens=3, compile=False)[0].text,
    "load_model": lambda: load_model(SHIPPED_MODEL).rotary.inv_freq.tolist(),
    "accelerate": lambda: accelerated("deepseek_v2", 2, do_sample=False),
    "sampled": lambda: accelerated(
        "deepseek_v2", do_sample=True, output_logits=True, return_dict_in_generate=True
    ),
    "recurrent": lambda: accelerated("kimi_linear", do_sample=False),
    "decode_segment": lambda: decode_segment(LENS, TABLE, q_len=2, page_size=4)[1].tolist(),
    "prefill_segment": lambda: prefill_segment([3, 2], [0, 1], TABLE, page_size=4)[1].tolist(),
    "inspect": lambda: len(str(inspect_forward(copy.deepcopy(MODEL), rows=2, prefill_tokens=3))) > 0,
}


@pytest.mark.long
def test_a_step_is_one_graph_whatever_the_default_device() -> None:
    model, k = one_layer_model(), 1
    allocate(model.cache_specs(), 9, 4)
    decoder = SpeculativeDecoder(model, k, page_size=4, sampled=True)
    state = DecodeState.allocate(2, k, max_pages=4, penalised_vocab=40)
    graphs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            found = capture_graph(decoder, (state,), {})
        assert found is not None
        graphs.append([(node.op, str(node.target)) for node in found[0].graph.nodes])
    assert graphs[0] == graphs[1]


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_a_default_device_without_values_changes_nothing(use: str) -> None:
    expected = USES[use]()
    with torch.device("meta"):
        assert USES[use]() == expected
