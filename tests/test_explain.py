"""`mla_compile.explain`: its text and picture; it runs nothing and leaves nothing behind."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import mla_compile
from mla_compile import MLAError, explain
from mla_compile.cli.commands import inspect
from mla_compile.explanation.inspect import inspect_forward, inspect_step
from mla_compile.ops.attention.append import mla_append
from mla_compile.ops.attention.decode import decode_op
from mla_compile.passes import PASSES
from mla_compile.passes.nodes import calls, op_arguments, with_arguments
from mla_compile.passes.remove_noops import remove_noops
from tests.models_for_tests import tiny_model
from tests.passes.capture import RANK, ROPE, Capture, Stack, make_inputs, nodes_of, shape
from tests.passes.mla_modules import BATCH, HIDDEN, KEYS, StaticCacheMLA

DECODE, PREFILL = {"rows": 2, "q_len": 3}, {"chunks": (4,)}


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> None:
    torch.compiler.reset()


def test_a_mixed_batch_is_shown_by_segment_with_identical_layers_folded() -> None:
    text, total, _ = str(explain(Stack(3), *make_inputs(**DECODE, **PREFILL))).partition("  all nodes")
    assert total
    expected = """\
3 attention calls; passes: split_prefill_decode

layers.0 ... layers.2: 3 calls, all the same
  tokens   10 = 6 decode (2 rows x q_len 3) + 4 prefill (1 chunk)
  before   mla_attention(q_nope [10, 3, 6], q_pe [10, 3, 4], kv_c [10, 16], k_pe [10, 4]) -> [10, 3, 5]
  append   mla_append   kv_c [10, 16], k_pe [10, 4] -> kv_cache [49, 4, 20]
  split    q, kv into 6 decode and 4 prefill tokens
  decode   absorb       q_nope [6, 3, 6] @ w_uk [3, 6, 16] -> q_latent [6, 3, 16]
           mla_decode   q_latent [6, 3, 16], q_pe [6, 3, 4] -> [6, 3, 16]
           up-project   [6, 3, 16] @ w_uv [3, 16, 5] -> [6, 3, 5]
  prefill  mla_prefill  q [4, 3, 10], 6 keys read -> [4, 3, 5]
  join     mla_prefill  [6, 3, 5] + [4, 3, 5] -> [10, 3, 5]

nodes after each pass
  op              captured  split_prefill_decode
  mla_append             -                     3
  mla_attention          3                     -
  mla_decode             -                     3
  mla_prefill            -                     3
  cat                    -                     4
  getitem               12                    27
  matmul_by_head         -                     6
  split                  6                    12
"""
    assert text == expected


@pytest.mark.parametrize(
    ("batch", "shown", "hidden"),
    [
        (DECODE, "mla_decode", ["mla_prefill", "join", "split "]),
        (PREFILL, "mla_prefill", ["mla_decode", "join"]),
    ],
    ids=["decode only", "prefill only"],
)
def test_a_segment_that_the_batch_lacks_is_not_shown(batch: dict, shown: str, hidden: list[str]) -> None:
    text = str(explain(Stack(1), *make_inputs(**batch))).split("nodes after")[0]
    assert shown in text and not any(f"  {word}" in text for word in hidden)


def test_dynamic_sizes_are_numbered_and_come_with_the_calls_sizes() -> None:
    x, batch = make_inputs(**DECODE)
    for tensor in (x, batch.decode.seq_lens, batch.decode.block_table, batch.decode.slot_mapping):
        torch._dynamo.mark_dynamic(tensor, 0)
    text = str(explain(Stack(1), x, batch))
    assert re.search(r"^.*dynamic sizes.*\bs0 = \d+", text, re.MULTILINE)


@pytest.mark.long
def test_the_speculative_step_is_explained() -> None:
    text = str(inspect_step(tiny_model(torch.float32), num_speculative_tokens=3, rows=2))
    assert "model.layers.0.self_attn ... drafter.model.mtp.layer.self_attn: 3 calls" in text
    assert "5 attention calls" in text


def test_a_forward_of_the_model_is_explained() -> None:
    text = str(inspect_forward(tiny_model(torch.float32), num_speculative_tokens=1, rows=3, prefill_tokens=9))
    assert "tokens   15 = 6 decode (3 rows x q_len 2) + 9 prefill (1 chunk)" in text


def test_inspecting_nothing_is_refused_by_name() -> None:
    with pytest.raises(MLAError, match=r"^rows, prefill_tokens: "):
        inspect_forward(tiny_model(torch.float32), rows=0, prefill_tokens=0)
    with pytest.raises(MLAError, match=r"^rows: .*\b0\b"):
        inspect_step(tiny_model(torch.float32), rows=0)


def test_nothing_runs_and_the_caches_stay_as_they_are() -> None:
    model = Stack(2)
    caches = [buffer.clone() for buffer in model.buffers()]
    explain(model, *make_inputs(**DECODE))
    assert all(torch.equal(now, before) for now, before in zip(model.buffers(), caches))


def test_compiled_code_is_neither_lost_nor_shared() -> None:
    model, inputs = Stack(1), make_inputs(**DECODE)
    capture = Capture()
    compiled = torch.compile(model, backend=capture, fullgraph=True)
    compiled(*inputs)
    explain(compiled, *make_inputs(rows=3, q_len=2))
    compiled(*inputs)
    assert len(capture.before) == 1, "explain made torch.compile forget what it had compiled"


def test_sizes_that_were_explained_stay_static_in_a_later_compile() -> None:
    model, capture = Stack(1), Capture()
    for rows in (2, 3, 4):
        text = str(explain(model, *make_inputs(rows=rows)))
        assert f"{rows} decode" in text, "a second size must not be shown as dynamic"
    torch.compile(model, backend=capture, fullgraph=True)(*make_inputs(rows=5))
    assert shape(nodes_of(capture.before[0], "mla_attention")[0])[0] == 5


def test_a_call_without_attention_is_explained_too(tmp_path: Path) -> None:
    explanation = explain(nn.Linear(3, 2), torch.zeros(1, 3))
    assert "no mla_attention" in str(explanation)
    ET.parse(explanation.save(tmp_path / "plain.svg"))


def test_mla_in_plain_torch_is_explained_with_the_pass_that_absorbs_it(tmp_path: Path) -> None:
    model = StaticCacheMLA(lambda positions: torch.arange(KEYS) <= positions[:, None, :, None])
    with torch.no_grad():
        explanation = explain(model, torch.randn(BATCH, 1, HIDDEN).double(), torch.tensor([1, 2]))
    assert list(explanation.graphs) == ["captured", "absorb_mla"]
    assert "passes: absorb_mla" in str(explanation) and "mla_masked_decode" in str(explanation)
    ET.parse(explanation.save(tmp_path / "absorbed.svg"))


def halve(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """A user's pass that halves the queries of every decode segment."""
    for node in calls(gm.graph, decode_op):
        query = op_arguments(node)["q_latent"]
        with gm.graph.inserting_before(node):
            node.args, node.kwargs = with_arguments(
                node, q_latent=gm.graph.call_function(torch.mul, (query, 0.5))
            )
    return gm


def test_a_users_own_pass_is_shown_with_what_it_changed_and_one_that_changed_nothing_is_not(
    tmp_path: Path,
) -> None:
    model, inputs = Stack(2), make_inputs(**DECODE)
    nothing = partial(remove_noops)
    explanation = explain(model, *inputs, passes=[*PASSES, halve, nothing, halve])
    assert list(explanation.graphs) == ["captured", "split_prefill_decode", "halve", "halve 2"]
    text = str(explanation)
    assert "passes: split_prefill_decode, halve, halve 2\n" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("  mul "))
    assert row == ["mul", "-", "-", "2", "4"]
    assert explanation.layers == explain(model, *inputs).layers, "the calls are drawn as without it"
    words = [box[-1] for box in text_boxes(explanation.save(tmp_path / "halved.svg"))]
    assert any(word.endswith("passes: split_prefill_decode, halve, halve 2") for word in words)


@pytest.mark.parametrize("passes", [[], [remove_noops]], ids=["none", "one that finds nothing"])
def test_a_unified_call_that_no_pass_splits_is_counted_and_not_drawn(passes: list, tmp_path: Path) -> None:
    explanation = explain(Stack(2), *make_inputs(**DECODE), passes=passes)
    assert list(explanation.graphs) == ["captured"] and not explanation.layers.groups
    text = str(explanation)
    assert text.startswith("2 attention calls; passes: none\n") and "mla_attention" in text
    ET.parse(explanation.save(tmp_path / "unsplit.svg"))


def test_a_model_that_calls_the_segment_ops_itself_is_explained_too() -> None:
    _, batch = make_inputs(**DECODE)

    def append(kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        mla_append(kv_c, k_pe, cache, batch.decode.slot_mapping)
        return cache.sum()

    text = str(explain(append, torch.randn(6, RANK), torch.randn(6, ROPE), torch.zeros(49, 4, RANK + ROPE)))
    assert text.startswith("0 attention calls; passes: none\n") and "no mla_attention" in text


def test_a_call_without_tensor_operations_is_an_error() -> None:
    with pytest.raises(MLAError, match=r"^model: .*tensor operations"):
        explain(lambda: 3)


def test_a_graph_break_is_reported_by_torch() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        explain(breaks, torch.zeros(1))


# --- the picture


def text_boxes(svg: Path) -> list[tuple[float, float, float, float, str]]:
    """Left, top, right and bottom edge of every text, by the advance of a wide font, and the text."""
    root, boxes = ET.parse(svg).getroot(), []
    style = root.findtext("{*}style") or ""
    sizes = {name: float(size) for name, size in re.findall(r"(\w+) {.*font-size: ([\d.]+)px", style)}
    middle = set(re.findall(r"(\w+) {.*text-anchor: middle", style))
    shifts = dict.fromkeys(root.iter(), 0.0)
    for panel in root.iterfind("*[@class='panel']"):
        shifts |= dict.fromkeys(
            panel.iter(), float(panel.get("transform", "").removeprefix("translate(0 ")[:-1])
        )
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        kind = text.get("class", "text").partition(" ")[0]
        x, y, size = float(text.get("x", 0)), float(text.get("y", 0)) + shifts[text], sizes[kind]
        width = 0.62 * size * len(text.text or "")
        left = x - width / 2 if kind in middle else x
        boxes.append((left, y - size * 0.8, left + width, y + size * 0.2, text.text or ""))
    return boxes


@pytest.mark.parametrize("batch", [DECODE, PREFILL, DECODE | PREFILL], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("unbacked", [False, True], ids=["static", "unbacked"])
def test_no_two_texts_of_the_picture_overlap_and_none_leaves_it(
    batch: dict, unbacked: bool, tmp_path: Path
) -> None:
    path = explain(Stack(2), *make_inputs(**batch, unbacked=unbacked)).save(tmp_path / "picture.svg")
    root = ET.parse(path).getroot()
    boxes = sorted(text_boxes(path))
    for i, (left, top, right, bottom, text) in enumerate(boxes):
        assert (
            left >= 0 and right <= float(root.get("width", 0)) and bottom <= float(root.get("height", 0))
        ), text
        for other_left, other_top, other_right, other_bottom, other in boxes[i + 1 :]:
            apart = other_left >= right or other_right <= left or other_top >= bottom or other_bottom <= top
            assert apart, f"{text!r} and {other!r} overlap"


def test_the_picture_shows_segments_and_says_which_one_is_absent(tmp_path: Path) -> None:
    words = [
        box[-1] for box in text_boxes(explain(Stack(1), *make_inputs(**DECODE)).save(tmp_path / "a.svg"))
    ]
    assert {"mla_attention", "mla_append", "absorb", "mla_decode", "up-project", "no prefill tokens"} <= set(
        words
    )
    assert "mla_prefill" not in words and "cat" not in words


def test_a_picture_is_an_svg() -> None:
    with pytest.raises(MLAError, match=r"\.svg\b.*picture\.png"):
        mla_compile.explain(nn.Linear(3, 2), torch.zeros(1, 3)).save("picture.png")


# --- the command


@pytest.mark.long
def test_the_command_prints_the_explanation_and_saves_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(rows=1, num_speculative_tokens=0, prefill_tokens=5, output=tmp_path / "picture.svg")
    out = capsys.readouterr().out
    assert "tokens   6 = 1 decode (1 row x q_len 1) + 5 prefill (1 chunk)" in out
    assert out.endswith("picture.svg\n") and ET.parse(tmp_path / "picture.svg")


def test_the_command_refuses_prompts_in_a_step_and_pictures_that_are_no_svg() -> None:
    with pytest.raises(MLAError, match="--prefill-tokens"):
        inspect(step=True, prefill_tokens=3)
    with pytest.raises(MLAError, match="--output"):
        inspect(output=Path("picture.png"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((5,), "model: expected a module or a function, got 5"),
        ((nn.Linear(2, 2),), "args: expected the arguments of a call of the model, got missing"),
        (
            (nn.Linear(2, 2), torch.ones(2), 1),
            "args: expected the arguments of a call of the model, got too many",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MLAError, match=f"^{message}"):
        explain(*args)


def test_a_picture_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    explanation = explain(nn.Linear(2, 2), torch.ones(2))
    with pytest.raises(
        MLAError, match=r"^path: expected a file that can be written, got No such file.*; .*none/a.svg"
    ):
        explanation.save(tmp_path / "none" / "a.svg")
    with pytest.raises(MLAError, match=r"^path: expected a file name that ends in .svg, got 3"):
        explanation.save(3)  # type: ignore[arg-type]


def test_a_function_without_a_signature_is_explained() -> None:
    assert len(explain(torch.add, torch.ones(2), torch.ones(2)).graphs["captured"].graph.nodes) == 4
