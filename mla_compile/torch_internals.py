"""Every private torch API that the package uses, in one place: if a torch release breaks one, the fix is here.

Inductor is imported on first use, so that `import mla_compile` stays light.
"""

import functools
import math
import operator
import os
import pkgutil
import socket
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx

from mla_compile.errors import MLAError

WORKING_TORCH = "2.11 to 2.15"
"""The versions of torch that the tests ran with."""


def _lacks(api: str) -> MLAError:
    hint = f"this version of mla-compile works with torch {WORKING_TORCH}: install one of them"
    return MLAError("torch", f"a version with {api}", torch.__version__, hint)


try:
    from torch._logging._internal import trace_structured
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch.utils import _pytree
except ImportError as error:
    raise _lacks("trace_structured, FakeTensor, FakeTensorMode and _pytree") from error

COMPILER_APIS = (
    "torch._dynamo:config.patch",
    "torch._dynamo:mark_static",
    "torch._dynamo:mark_static_address",
    "torch._dynamo:run",
    "torch._dynamo.comptime:comptime",
    "torch._dynamo.decorators:mark_unbacked",
    "torch._dynamo.exc:BackendCompilerFailed",
    "torch._dynamo.exc:ShortenTraceback",
    "torch._dynamo.utils:compilation_time_metrics",
    "torch._guards:TracingContext.extract_stack",
    "torch._inductor:config",
    "torch._inductor:list_mode_options",
    "torch._inductor.codecache:CppPythonBindingsCodeCache",
    "torch._inductor.compile_fx:compile_fx",
    "torch._inductor.cpu_vec_isa:valid_vec_isa_list",
    "torch._inductor.exc:OperatorIssue",
    "torch._ops:HigherOrderOperator",
    "torch._ops:OpOverload",
    "torch._ops:OpOverloadPacket",
    "torch.fx.experimental:_config",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
)
"""The private APIs that every compile may need; `check_torch` looks for them."""

if TYPE_CHECKING:  # some builds of torch lack it
    from torch._C._distributed_c10d import TCPStore as TCPStore


@functools.cache
def check_torch() -> None:
    """Look for all of `COMPILER_APIS`, so that an error comes before a compile and not within it.

    Raises:
        MLAError: the installed torch lacks one, which is named with the versions that work.
    """
    for name in COMPILER_APIS:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise _lacks(name.replace(":", ".")) from error


class CompiledCall(NamedTuple):
    """A call of compiled code.

    addresses: of inputs that stay where they are. outputs: has a function that allocates a tensor like it in place of
    each tensor.
    """

    function: Callable[..., Any]
    addresses: list[int]
    outputs: Any


def statically_known_true(condition: Any) -> bool:
    """Whether a comparison of sizes, which may be symbolic, is certainly true; the check adds no guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return known(condition)


def size_hint(size: Any) -> int | None:
    """A size in this compile's example inputs, None if it is unbacked; the call adds no guard."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if isinstance(hint, int) else None


def symbols_of(size: Any) -> set[Any]:
    """The symbols in a size, or in a number computed from values; empty for a known number."""
    return set(size.node.expr.free_symbols) if hasattr(size, "node") else set()


def symbols_read_from(value: Any) -> set[Any]:
    """The symbols that compiled code reads from an input: from a tensor's sizes, or from a number.

    From a number it reads the number's own symbol, even if torch has replaced that by an equal one.
    """
    if isinstance(value, torch.Tensor):
        found = [size.node.expr for size in value.shape if hasattr(size, "node")]
    else:
        found = [value.node._expr] if hasattr(value, "node") else []
    return {one for one in found if one.is_symbol}


def size_where_symbols_are(size: Any, number: int) -> int:
    """A size, with a number for each of its symbols; the call adds no guard."""
    if isinstance(size, int):
        return size
    return int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, number)))


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Inside the context, tensors have values and versions and need no gradient, even while torch traces."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake: it has a shape, a dtype and a device, but no values."""
    return isinstance(tensor, FakeTensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that wraps other tensors, for example quantised or sharded."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of `torch.func` wraps a tensor, such as `vmap`."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether compiled code can take a tensor as an input: not one of a subclass that wraps other tensors, a view that
    negates or conjugates, a complex view of real numbers, or a real view of complex ones."""
    base = tensor if tensor._base is None else tensor._base
    lazy = tensor.is_neg() or tensor.is_conj() or base.is_complex() != tensor.is_complex()
    return not (lazy or is_wrapper(tensor))


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Inductor's options of each `torch.compile` mode."""
    from torch._inductor import list_mode_options

    modes: dict[str, dict[str, Any]] = list_mode_options()
    return modes


def inductor_options() -> set[str]:
    """The option names of Inductor's config, as `torch.compile(options=...)` spells them (dots for nesting)."""
    from torch._inductor import config

    return set(config.get_config_copy())


def needs_gradients(gm: fx.GraphModule) -> bool:
    """Whether any result of a Dynamo graph needs gradients."""
    results = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="output")[0].all_input_nodes]
    return any(isinstance(result, torch.Tensor) and result.requires_grad for result in results)


def lower_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor under the given config options."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import OperatorIssue

    if any(isinstance(x, torch.Tensor) and x.is_cpu for x in example_inputs):
        start_cpp_compiler()
    # On the first call of an op without a lowering, torch 2.11 formats the arguments and everything that they were
    # computed from, even if the log is off. That text doubles with each preceding layer, so it takes forever.
    with mock.patch.object(
        OperatorIssue, "operator_str", staticmethod(lambda target, *_: f"target: {target}")
    ):
        return cast("Callable[..., Any]", compile_fx(gm, example_inputs, config_patches=options))


@functools.cache
def start_cpp_compiler() -> None:
    """Start `_compile_smallest_kernel` in a thread, once in a process.

    A second thread waits for the first one that detects the CPU's vector instructions: torch keeps the flags of a check
    in the object that it checks. Two checks at once leave other flags behind, which are in the names of all kernels, so
    that the next process would compile them again.
    """
    import torch._inductor.cpu_vec_isa

    detect, lock = torch._inductor.cpu_vec_isa.valid_vec_isa_list, threading.Lock()

    @functools.cache
    def detected() -> list[Any]:
        with lock:
            return detect()

    torch._inductor.cpu_vec_isa.valid_vec_isa_list = detected
    threading.Thread(target=_compile_smallest_kernel, daemon=True).start()


def _compile_smallest_kernel() -> None:
    """Make Inductor detect the CPU's vector instructions and compile the header of its kernels, which takes 9 s on a
    slow core, so that a compile does not wait for it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    kernel = 'extern "C" void kernel(float* x) { at::vec::Vectorized<float>(0).store(x); }'
    with suppress(Exception):  # the compile raises the same error
        CppPythonBindingsCodeCache.load_pybinding(
            ["float*"], f"#include <torch/csrc/inductor/cpp_prefix.h>\n{kernel}\n"
        )


def trace_graph(name: str, gm: fx.GraphModule) -> None:
    """Write a graph to the structured trace, which `tlparse` shows."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False, include_stride=True, include_device=True),
    )


def mark_state_tensor(tensor: torch.Tensor, *varying: int) -> None:
    """Mark a tensor's address as static: a replay copies nothing. varying: see `mark_sizes`."""
    torch._dynamo.mark_static_address(tensor, guard=False)
    mark_sizes(tensor, *varying)


def mark_sizes(tensor: torch.Tensor, *varying: int) -> None:
    """Mark a tensor's sizes `varying` as dynamic.

    The other sizes are marked static; otherwise Dynamo would make a size a symbol once it has seen two values. Compiled
    code serves only tensors with the same marks.
    """
    for dim in range(tensor.dim()):
        if dim in varying:
            mark_varying(tensor, dim)
        else:
            torch._dynamo.mark_static(tensor, dim)


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether `mark_state_tensor` has marked it."""
    return hasattr(tensor, "_dynamo_static_input_type")


class SizeName(str):
    """A name for one size of several tensors that are created together.

    Guards compare names as text, so a graph accepts tensors that are created later. Each object has its own hash, so a
    trace does not merge two sizes if two batches use the same name.
    """

    __hash__ = object.__hash__


def size_name(size: str, least: int) -> SizeName:
    """A name for a size that is always at least `least`; for `mark_varying` and `know_least_sizes`."""
    return SizeName(f"{_OURS}{least}: {size}")


def mark_varying(tensor: torch.Tensor, dim: int = 0, *, name: SizeName | None = None) -> None:
    """Mark a size of a tensor as varying from call to call; 1 is not special.

    name: sizes with the same `SizeName` object are equal; a size without a name is independent of all others.
    """
    torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=name)


_OURS = "mla_compile, at least "


def know_least_sizes(example_inputs: Sequence[Any]) -> None:
    """Declare to torch the lower bounds of a graph's input sizes that are named by `size_name`.

    Inductor checks whether some products have a single matrix row, and which strides of a CUDA graph's inputs are 0 or
    the smallest. For an unbacked size without a bound these checks fail. (From torch 2.12 on, `mark_unbacked` itself
    accepts a lower bound.)
    """
    size = next((value for value in example_inputs if isinstance(value, torch.SymInt)), None)
    if size is None:
        return
    shape_env = size.node.shape_env
    for name, symbol in shape_env._shape_id_to_unbacked_symbol.items():
        if name.startswith(_OURS):
            least = int(name.removeprefix(_OURS).partition(":")[0])
            torch._check(shape_env.create_symintnode(symbol, hint=None) >= least)


def adjacent_tensors(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor], tuple[int, ...]]:
    """Uninitialised tensors in one buffer, which one copy can fill.

    Returns the buffer, `[n]`, the tensors, and the offset of each in the buffer, in elements. Each offset is a multiple
    of 16 bytes, which Inductor assumes.
    """
    places, end, unit = [], 0, 16 // dtype.itemsize
    for shape in shapes:
        places.append(end)
        end += -(-math.prod(shape) // unit) * unit
    whole = torch.empty(end, dtype=dtype, device=device)
    parts = [with_shape(whole[place:], shape) for place, shape in zip(places, shapes, strict=True)]
    return whole, parts, tuple(places)


def with_shape(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor at the beginning of `flat`'s memory, `[n]`, that the compiler does not see as a view.

    A graph for a view would depend on the view's base and on its offset there.
    """
    size, begin = flat.dtype.itemsize, flat.storage_offset() * flat.dtype.itemsize
    memory = flat.untyped_storage()[begin : begin + math.prod(shape) * size]
    strides = [math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape))]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(memory, 0, shape, strides)


def as_varying(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory, whose first size is marked as varying.

    What compiled code returns can be a view, and a graph for a view would depend on the sizes of its base.
    """
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    own.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    mark_varying(own)
    own._mla_varying = True  # type: ignore[attr-defined]
    return own


def with_own_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same bound method with its own code object.

    Dynamo keeps compiled versions per code object and raises an error for the ninth under `fullgraph`; methods of
    different instances would share that limit.
    """
    assert isinstance(method, types.MethodType)
    function = method.__func__
    code = function.__code__.replace()
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copy, method.__self__)


def eager_until_compiled(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Run what `torch.compile` returned: by its compiled code once another thread has compiled it, else eagerly.

    It also runs eagerly while another thread traces, which torch regards as a nested trace. Compiled code depends on
    whether gradients are on: they are off.
    """
    run = torch._dynamo.run(compiled)

    def call(*args: Any) -> Any:
        with torch.no_grad(), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            return run(*args)

    return call


def settings_of_compiled_code() -> tuple[object, ...]:
    """The settings of torch for which code is compiled: with others, `torch.compile` compiles again."""
    return (
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


@contextmanager
def tracing_this_thread() -> Iterator[None]:
    """Let tracers of FX record this thread only.

    A tracer replaces `nn.Module.__call__` in the whole process: while Inductor traces a function, a module that another
    thread calls would be a submodule that the tracer does not know, an error.
    """
    mine, call_module = threading.get_ident(), fx.Tracer.call_module

    def call(
        tracer: fx.Tracer, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if threading.get_ident() != mine:
            return forward(*args, **kwargs)
        return call_module(tracer, m, forward, args, kwargs)

    with mock.patch.object(fx.Tracer, "call_module", call):
        yield


def is_mutable(op: object) -> bool:
    """Whether an op may write to one of its arguments.

    The schema decides; for a call that leaves the overload open (`torch.ops.lib.op(x)`), the schema of any overload.
    A higher-order operator counts as writing, as the functions that it runs are not inspected.
    """
    if isinstance(op, torch._ops.OpOverloadPacket):
        return any(is_mutable(getattr(op, name)) for name in op.overloads())
    if isinstance(op, torch._ops.OpOverload):
        return bool(op._schema.is_mutable)
    return isinstance(op, torch._ops.HigherOrderOperator)


def overload_of(op: Any) -> Any:
    """The overload that `torch.ops.lib.op(x)` calls if the op has only one; any other target unchanged."""
    names: list[str] = op.overloads() if isinstance(op, torch._ops.OpOverloadPacket) else []
    return getattr(op, names[0]) if len(names) == 1 else op


def schema_arguments(op: Any) -> Sequence[Any]:
    """The arguments of an op's schema, with their `name`, `default_value` and `kwarg_only`."""
    return cast("Sequence[Any]", overload_of(op)._schema.arguments)


def storage_key(tensor: torch.Tensor) -> int:
    """A key that is equal for live tensors that share memory, including fake tensors and views."""
    key: int = tensor.untyped_storage()._cdata
    return key


def memory_of(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    """For each tensor its storage, its offset there, and its version counter (-1 for inference tensors).

    The list keeps no memory alive: the storage is a weak reference, equal only to references to the same storage.
    """
    with torch._C.DisableTorchFunctionSubclass():  # subclasses are read as quickly as plain tensors
        return [
            (weakref.ref(x.untyped_storage()), x.storage_offset(), -1 if x.is_inference() else x._version)
            for x in tensors
        ]


class _Captured(Exception):
    """Aborts a compile after its graph has been captured."""


def run_check(check: Callable[..., object], *arguments: Any) -> None:
    """Run `check(*arguments)`; while Dynamo traces this call, run it at trace time.

    At trace time it runs twice on tensors without values: with the sizes of the traced call, so that its errors are
    those of eager, and with the symbolic sizes of the trace, so that its calls of `torch._check` become guards.

    arguments: tensors, numbers, names, None, and tuples of these.

    Raises:
        MLAError: the error of `check`. Dynamo raises it unchanged and adds the line of the user's code.
    """
    # From torch 2.13 on `is_compiling` is true in all threads while one compiles.
    if not torch.compiler.is_dynamo_compiling():
        check(*arguments)
        return
    from torch._dynamo.comptime import comptime

    comptime(_check_arguments, lambda: check(*arguments))  # the lambda runs if this line is not traced


def refuse(name: str, expected: str, got: str, hint: str = "") -> None:
    """Raises `MLAError` in code that Dynamo may trace; Dynamo would replace an error that traced code raises itself."""
    run_check(_refuse, name, expected, got, hint)


def _refuse(*arguments: Any) -> None:
    raise MLAError(*arguments)


def _check_arguments(context: Any) -> None:
    """`run_check` while tracing; `context` has its locals."""
    check = context.get_local("check").as_python_constant()
    given = context.get_local("arguments")._i_will_not_complain_if_bc_breaks_VariableTracker()
    with _specialized_sizes():
        arguments = _proxies(given)
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    try:
        for examples in _examples(arguments, *_sizes_of_inputs(output)):
            check(*examples)
        check(*_pytree.tree_map_only(fx.Proxy, lambda proxy: proxy.node.meta["example_value"], arguments))
    except MLAError as error:
        raise _passed_on()(error, torch._guards.TracingContext.extract_stack()) from None


def size_in_call(size: int | torch.SymInt, gm: fx.GraphModule) -> Callable[[Sequence[Any]], int] | None:
    """A function that reads a size of a Dynamo graph from the inputs of a call; None if no input has that size."""
    if isinstance(size, int):
        return lambda inputs: size

    def is_it(given: Any) -> bool:
        return hasattr(given, "node") and given.node._expr == size.node._expr

    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        example = node.meta["example_value"]
        if is_it(example):
            return operator.itemgetter(i)
        for dim, given in enumerate(example.shape if isinstance(example, torch.Tensor) else ()):
            if is_it(given):
                return lambda inputs, i=i, dim=dim: int(inputs[i].shape[dim])  # type: ignore[misc]
    return None


@contextmanager
def _specialized_sizes() -> Iterator[None]:
    """Inside the context, an input may share a varying size with an input whose size an unmarked tensor made static.

    Otherwise torch creates a symbol for the size, does not find it in the input, and raises an error.
    """
    from torch.fx.experimental import _config, symbolic_shapes

    soft = mock.patch.object(_config, "soft_pending_unbacked_not_found_error", True)
    with soft, mock.patch.object(symbolic_shapes.log, "warning"):
        yield


def _proxies(variable: Any) -> Any:
    """The proxy of a value in a trace; for a value that a graph cannot have, an object of a type with the same name."""
    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if variable.python_type() in (list, tuple):
        return variable.python_type()(map(_proxies, variable.items))
    try:
        return variable.as_proxy()
    except (NotImplementedError, RuntimeError):
        return type(variable.python_type().__name__, (), {})()


def _sizes_of_inputs(output: Any) -> tuple[dict[Any, int], dict[Any, set[int]]]:
    """The values of the symbolic input sizes of a trace in the traced call.

    Returns the size of each symbol, and the sizes of all symbols that the trace has merged, by the merged symbol.
    """
    exact: dict[Any, int] = {}
    merged: dict[Any, set[int]] = defaultdict(set)
    scopes: tuple[Any, Any] = {"G": output.global_scope}, {"L": output.local_scope}
    for tracked in output.tracked_fakes:
        fake = tracked.fake
        if isinstance(fake, torch.Tensor) and any(hasattr(size, "node") for size in fake.shape):
            try:
                real = tracked.source.get_value(*scopes, {})
            except Exception:  # for the caller it is not a tensor, but for example an array
                continue
            for size, number in zip(fake.shape, real.shape):
                if hasattr(size, "node"):
                    exact[size.node._expr] = number
                    merged[size.node.expr].add(number)
    return exact, merged


def _examples(arguments: Any, exact: dict[Any, int], merged: dict[Any, set[int]]) -> Iterator[Any]:
    """The arguments of a trace with tensors of known sizes in place of symbolic ones.

    It yields several if the trace has merged input sizes that differ in the call: a computed tensor has one of these
    sizes, but the trace does not determine which.
    """
    mode = FakeTensorMode()

    def known(size: Any, is_input: bool, index: int) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        node = size.node
        if is_input and node._expr in exact:
            return exact[node._expr]
        if node.expr in merged:
            choice = sorted(merged[node.expr])
            return choice[index % len(choice)]
        numbers = {symbol: min(merged[symbol]) for symbol in node.expr.free_symbols if symbol in merged}
        number = node.expr.subs(numbers)
        return int(number) if number.is_number else size if node.hint is None else node.hint

    def example(proxy: fx.Proxy, index: int) -> Any:
        value, is_input = proxy.node.meta["example_value"], proxy.node.op == "placeholder"
        if isinstance(value, torch.SymFloat):
            return value.node.hint
        if not isinstance(value, FakeTensor):
            return known(value, is_input, index)
        shape, strides = ([known(n, is_input, index) for n in x] for x in (value.shape, value.stride()))
        if not all(isinstance(n, int) for n in (*shape, *strides)):
            return value
        with mode:
            like = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        return like.requires_grad_(value.requires_grad)

    for index in range(max(map(len, merged.values()), default=1)):
        yield _pytree.tree_map_only(fx.Proxy, functools.partial(example, index=index), arguments)


@contextmanager
def errors_passed_on() -> Iterator[None]:
    """Inside a backend: Dynamo raises an `MLAError` unchanged, instead of its own error that quotes it."""
    try:
        yield
    except MLAError as error:
        raise _passed_on()(error) from error.__cause__


_PACKAGE = str(Path(__file__).parent) + os.sep


@functools.cache
def _passed_on() -> Callable[..., MLAError]:
    """A subclass of `MLAError` that Dynamo raises unchanged, made from an error and the stack of the traced code."""
    from torch._dynamo.exc import ShortenTraceback

    class PassedOn(MLAError, ShortenTraceback):
        def __init__(self, error: MLAError, stack: Any = None) -> None:
            ShortenTraceback.__init__(self, *error.args, first_useful_frame=None)
            self.__dict__ |= error.__dict__
            if stack is not None:
                while stack and stack[-1].filename.startswith(_PACKAGE):
                    stack.pop()
                self.real_stack = stack  # Dynamo shows it after the message

        def __reduce__(self) -> Any:
            return MLAError, (self.name, self.expected, self.got, self.hint)

        def remove_dynamo_frames(self) -> "PassedOn":
            return self.with_traceback(None)

    PassedOn.__name__ = PassedOn.__qualname__ = "MLAError"
    PassedOn.__module__ = MLAError.__module__
    return PassedOn


def capture_graph(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, Sequence[Any]] | None:
    """The Dynamo graph of `function(*args, **kwargs)` and its fake inputs, without running the call.

    No state is left: the compile is aborted inside the backend, so no code is cached, and the compiled frame is local
    to this function, so the caller's compiled code is kept. Only marked sizes are dynamic, independent of earlier
    captures. None if the call has no tensor operation.

    Raises:
        torch._dynamo.exc.Unsupported: the call has a graph break; the message explains it.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import BackendCompilerFailed

    seen: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append((copy_graph(gm), example_inputs))  # torch 2.15 clears the graph of an aborted compile
        raise _Captured

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    patches = {"automatic_dynamic_shapes": False, "suppress_errors": False, "disable": False}
    with config.patch(patches), torch.compiler.set_stance("default"):
        try:
            torch.compile(call, backend=backend, fullgraph=True)(*args, **kwargs)
        except BackendCompilerFailed as failure:
            if not isinstance(failure.inner_exception, _Captured):
                raise
    return seen[0] if seen else None


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module with new nodes, which have the names and metadata of the old ones."""
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {}, return_output_node=True)
    assert isinstance(result, tuple), "a Dynamo graph has an output"
    graph.output(result[0])
    return fx.GraphModule(gm, graph)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The original function if `function` is the result of `torch.compile`, otherwise `function`."""
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        function = getattr(function, name, function)
    return function


_Call = Callable[[Callable[..., Any], list[int], tuple[Any, ...]], Any]
_call_instead: ContextVar[_Call | None] = ContextVar("takes calls of compiled code", default=None)


def noted(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What the backend returns to Dynamo: `compiled`, for `compiled_calls` and `would_repeat`."""

    def call(*inputs: Any) -> Any:
        if (instead := _call_instead.get()) is None:
            return compiled(*inputs)
        static = (x for x in inputs if isinstance(x, torch.Tensor) and not hasattr(x, "_mla_varying"))
        return instead(compiled, [x.data_ptr() for x in static], inputs)

    return call


@contextmanager
def _calling(instead: _Call) -> Iterator[None]:
    token = _call_instead.set(instead)
    try:
        yield
    finally:
        _call_instead.reset(token)


@contextmanager
def compiled_calls() -> Iterator[list[CompiledCall]]:
    """Inside the context, each call of code that the backend compiled is appended to the list."""
    calls: list[CompiledCall] = []

    def call(compiled: Callable[..., Any], addresses: list[int], inputs: tuple[Any, ...]) -> Any:
        result = compiled(*inputs)
        outputs = _pytree.tree_map_only(torch.Tensor, _empty_like, result)
        calls.append(CompiledCall(compiled, addresses, outputs))
        return result

    with _calling(call):
        yield calls


def _empty_like(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    size, stride = tensor.size(), tensor.stride()
    return functools.partial(torch.empty_strided, size, stride, dtype=tensor.dtype, device=tensor.device)


class _Differs(Exception):
    pass


def would_repeat(calls: Sequence[CompiledCall], function: Callable[..., Any], *args: Any) -> bool:
    """Whether a function would do the same as when it made these calls of compiled code; none of it runs.

    Dynamo's guards choose the same code, and weights, caches and states are where they were. Addresses of tensors from
    `as_varying` may differ. The function's own operations run, on uninitialized results of the compiled code.
    """
    expected = iter(calls)

    def call(compiled: Callable[..., Any], addresses: list[int], inputs: tuple[Any, ...]) -> Any:
        known = next(expected, None)
        if known is None or (known.function, known.addresses) != (compiled, addresses):
            raise _Differs
        return _pytree.tree_map_only(functools.partial, lambda allocate: allocate(), known.outputs)

    with _calling(call):
        try:
            function(*args)
        except _Differs:
            return False
    return next(expected, None) is None


def end_recording(device: torch.device, pool: Any, stream: torch.cuda.Stream) -> None:
    """After an error in a recording: let the allocator and the random generator leave it, which torch leaves out.

    Nothing more can be recorded to the pool: torch's allocator of host memory does not leave it.
    """
    with suppress(RuntimeError):  # it has left, unless the error ended the recording
        torch._C._cuda_endAllocateToPool(torch.cuda._utils._get_device_index(device), pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), None, stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


def cuda_graph_usage(device: torch.device, pool: object) -> tuple[int, int]:
    """The bytes of a memory pool of CUDA graphs on a device, and those of the driver.

    The driver's bytes are in use on the device and not held by torch's allocator: instantiated graphs, the code of
    kernels, other processes.
    """
    segments = torch.cuda.memory_snapshot()
    reserved = sum(each["total_size"] for each in segments if each["segment_pool_id"] == pool)
    free, total = torch.cuda.mem_get_info(device)
    return reserved, total - free - torch.cuda.memory_reserved(device)


def compile_seconds() -> float:
    """The seconds that this process has spent in Dynamo and the backends that it called."""
    from torch._dynamo.utils import compilation_time_metrics

    return sum(compilation_time_metrics.get("_compile.compile_inner", ()))


def meeting_place(size: int, port: int | None = None) -> "TCPStore":
    """The rendezvous store of `size` local processes at a port; without one, this process serves it at a new `port`.

    Only this machine can connect: a store that opens its own socket listens on all interfaces.
    """
    from torch._C._distributed_c10d import TCPStore

    host = "127.0.0.1"
    if port is not None:
        return TCPStore(host, port, size, wait_for_workers=False)
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    descriptor = listening.detach()  # the store closes it
    return TCPStore(host, port, size, True, wait_for_workers=False, master_listen_fd=descriptor)


def keep_gloo_on_loopback() -> None:
    """Let gloo groups made from now on listen on the loopback interface only, unless GLOO_SOCKET_IFNAME is set.

    By default gloo takes the interface of the machine's name, which other machines may reach.
    """
    loopback = {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex())
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())


def gloo_group(name: str, timeout: timedelta, ranks: Sequence[int] = ()) -> "dist.ProcessGroup":
    """A gloo group of processes of torch.distributed's default group, which it outlives; each of them must create it.

    ranks: the members' ranks in the default group, in the order of the new group's ranks; all by default.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    ranks = ranks or range(dist.get_world_size())
    store = PrefixStore(name, _get_default_store())
    # The type stub lacks the methods of a group.
    group: Any = dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)
    return cast("dist.ProcessGroup", group)


def symmetric_memory(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """CUDA memory that all processes of torch.distributed's default group can access; a collective call.

    It never uses multicast, which may disable GPUs that other processes share.

    Returns:
        This process's memory, uint8 `[num_bytes]`, and the address of each rank's memory on this device.

    Raises:
        RuntimeError: a device cannot access another device's memory.
    """
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import rendezvous

    assert dist.group.WORLD is not None
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"  # the rendezvous reads it
    try:
        # `empty` of torch 2.13 would allocate from a pool, where a tensor may begin anywhere in a block.
        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        handle = rendezvous(memory, dist.group.WORLD.group_name)
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
    assert not handle.multicast_ptr
    offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    return memory, [address + offset for address in handle.buffer_ptrs]


_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
