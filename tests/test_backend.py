"""`torch.compile(model, backend="mla")` on a user's own module."""

import copy
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_compile import Engine, MLABatch, MLAError, mla_attention, torch_internals
from mla_compile.backend import resolve_settings
from mla_compile.passes import PASSES
from mla_compile.torch_internals import inductor_modes
from tests.cases import Case, make_case
from tests.counters import compile_counters
from tests.models_for_tests import one_layer_model


class OwnModule(nn.Module):
    """A user's module: its own projections around one call of the unified op."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.register_buffer("kv_cache", case.kv_cache.clone())
        self.register_buffer("w_uk", case.w_uk)
        self.register_buffer("w_uv", case.w_uv)
        self.o_proj = nn.Linear(15, 8)

    def forward(self, q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, batch: MLABatch) -> Tensor:
        out = mla_attention(q_nope, q_pe, kv_c, k_pe, self.kv_cache, self.w_uk, self.w_uv, batch, 0.2)
        return torch.tanh(self.o_proj(out.flatten(1)))


MIXED = {"decode": [3, 6], "q_len": 2, "prefill": [(3, 2)], "poison": False}


def check(**compile_kwargs: object) -> None:
    case = make_case(**MIXED)
    eager = OwnModule(case)
    compiled = torch.compile(copy.deepcopy(eager), backend="mla", fullgraph=True, **compile_kwargs)
    inputs = (case.q_nope, case.q_pe, case.kv_c, case.k_pe, case.batch)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), eager(*inputs))
    torch.testing.assert_close(compiled.kv_cache, eager.kv_cache)


@pytest.mark.long
@pytest.mark.parametrize(
    "mode",
    ["default", "reduce-overhead", pytest.param("max-autotune-no-cudagraphs", marks=pytest.mark.slow)],
)
def test_a_users_module_compiles_without_a_graph_break_in_mode(mode: str) -> None:
    check(mode=mode)


def test_inductors_options_and_our_passes_are_taken() -> None:
    seen = []

    def my_pass(gm: torch.fx.GraphModule, example_inputs: object) -> torch.fx.GraphModule:
        seen.extend(node.name for node in gm.graph.nodes if "mla_" in node.name)
        return gm

    check(options={"epilogue_fusion": False, "passes": [*PASSES, my_pass]})
    assert seen == ["mla_append_default", "mla_decode_default", "mla_prefill_default"]


def test_the_entry_point_names_the_backend() -> None:
    assert "mla" in torch.compiler.list_backends()


def test_settings_of_a_mode_are_those_of_inductor_with_partitions() -> None:
    threads = {"cpp.dynamic_threads": True, "cpp.threads": os.cpu_count()}
    defaults = {"graph_partition": True, "joint_graph_constant_folding": False, **threads}
    for mode, options in inductor_modes().items():
        untimed = {"deterministic": not mode.startswith("max-autotune")}
        assert resolve_settings(mode, None) == {**defaults, **untimed, **options}
        assert resolve_settings(mode, {"batch_invariant": True})["deterministic"]
    ours = {"graph_partition": False, "deterministic": False}
    assert resolve_settings(None, ours) == {**defaults, **ours}


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("fastest", None, "^mode: .*default.*fastest"),
        (None, {"epilog_fusion": True}, "^options: .*epilog_fusion"),
        (None, {"passes": "split"}, r"^options\['passes'\]: .*list.*split"),
        (None, {"passes": [3]}, r"^options\['passes'\]"),
        (None, {"fp8_activations": 1}, r"^options\['fp8_activations'\]: expected True or False, got 1"),
        (
            None,
            {"fp8_activations": True, "batch_invariant": True},
            r"^options\['fp8_activations'\]: .*batch_inv",
        ),
        (None, {"decode_backend": "fast"}, r"^options\['decode_backend'\]: .*reference.*'fast'"),
    ],
)
def test_bad_settings_are_refused_by_name(mode: str | None, options: dict | None, message: str) -> None:
    with pytest.raises(MLAError, match=message):
        resolve_settings(mode, options)


def test_a_bad_option_stops_the_compile_instead_of_falling_back() -> None:
    case = make_case(**MIXED)
    compiled = torch.compile(OwnModule(case), backend="mla", options={"no_such_option": 1})
    with pytest.raises(Exception, match="no_such_option"):
        compiled(case.q_nope, case.q_pe, case.kv_c, case.k_pe, case.batch)


@pytest.mark.usefixtures("lowering")
def test_a_decode_backend_is_taken_and_one_that_cannot_serve_stops_the_compile_with_the_reason() -> None:
    check(options={"decode_backend": "reference"})
    case = make_case(**MIXED)
    compiled = torch.compile(OwnModule(case), backend="mla", options={"decode_backend": "triton"})
    with torch.no_grad(), pytest.raises(Exception, match=r"backend: .*triton.*cuda.*cpu"):
        compiled(case.q_nope, case.q_pe, case.kv_c, case.k_pe, case.batch)


def test_a_module_without_mla_compiles_as_with_inductor() -> None:
    module, x = nn.Linear(4, 3), torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(module, backend="mla", fullgraph=True)(x), module(x))
    assert compile_counters()["graphs"] >= 1


@pytest.mark.long
def test_the_cpp_compiler_begins_before_the_first_kernel_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, which compiles a kernel of its own; an error in it does not end the compile."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    written, done = [], threading.Event()
    load = CppPythonBindingsCodeCache.load_pybinding.__func__  # type: ignore[attr-defined]

    def loaded(*args: Any) -> Any:
        kernel = load(*args)
        if threading.current_thread() is threading.main_thread():
            return kernel
        x = torch.ones(16)
        kernel(x)
        written.append(x.tolist())
        done.set()
        raise OSError("no compiler")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", classmethod(loaded))
    # Private: the compiler starts once a process, and an earlier compile may have started it.
    torch_internals.start_cpp_compiler.cache_clear()
    function = torch.compile(lambda x: x.sin() + 1, backend="mla")
    function(torch.ones(8))
    assert done.wait(60) and written[0][0] == 0


def test_an_engine_starts_the_cpp_compiler_before_dynamo_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    monkeypatch.setattr("mla_compile.engine.steps.start_cpp_compiler", lambda: order.append("compiler"))

    def lower(gm: Any, *_: Any) -> Any:
        order.append("traced")
        return gm.forward

    monkeypatch.setattr("mla_compile.backend.lower_with_inductor", lower)
    Engine(one_layer_model(), max_rows=1, compile=True).generate([[1, 2]], max_new_tokens=2)
    assert order[0] == "compiler" and "traced" in order


def test_one_thread_at_a_time_detects_the_instructions_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once leave other compiler flags behind, with which the next process compiles all kernels again."""
    from torch._inductor import cpu_vec_isa

    at_once, most = 0, 0

    def detect() -> list[Any]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)
        at_once -= 1
        return []

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", detect)
    monkeypatch.setattr(torch_internals, "_compile_smallest_kernel", lambda: None)
    torch_internals.start_cpp_compiler.cache_clear()
    torch_internals.start_cpp_compiler()
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(cpu_vec_isa.valid_vec_isa_list) for _ in range(3)]
    assert [each.result() for each in found] == [[]] * 3 and most == 1


def test_an_op_that_comes_late_in_a_deep_graph_is_not_spelled_out_with_all_that_it_is_made_of() -> None:
    """Torch 2.11 always makes such a text, torch 2.13 for its log; it doubles with each layer."""

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    @torch.compile(backend="mla", fullgraph=True)
    def deep(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.ops.mla_deep.early(x, x)
        result: Tensor = torch.ops.mla_deep.late(x, x)
        return result

    from torch._inductor.utils import fresh_inductor_cache

    messages: list[str] = []
    logger = logging.getLogger("torch._inductor.graph")
    handler, level = Messages(), logger.level
    library = torch.library.Library("mla_deep", "FRAGMENT")
    with fresh_inductor_cache():
        for name in ("early", "late"):
            library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
            library.impl(name, torch.add, "CompositeExplicitAutograd")
            library.impl(name, lambda x, y: torch.empty_like(x), "Meta")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            torch.testing.assert_close(deep(torch.ones(3)), torch.full((3,), 2.0**9))
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    (of_late,) = [text for text in messages if "target: mla_deep.late" in text]
    assert "mla_deep.early" not in of_late
