"""The definition of all custom ops: one `torch.library.Library`, one way to add an op to it.

An op is declared once, by the layouts of its tensors and a function with its arguments. The function checks what the
layouts do not cover and returns an empty result:

    @define_op(table=APPEND, layouts={"kv_c": "tokens, kv_lora_rank", ...}, mutates=("kv_cache",))
    def mla_append(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        ...checks...

The schema follows from the function's signature. While compiling, the function is the op's fake implementation; in
eager calls it checks the arguments before the op runs. An argument that violates its docstring raises `MLAError`, by
name. The first candidate of the table that serves the call runs.

`Library.define` is used instead of `torch.library.custom_op` because a call takes less than half as long. It checks
no aliasing, so every op has an `opcheck` test.
"""

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from mla_compile.ops.dispatch import Call, Candidate, Selection, describe_device, select
from mla_compile.ops.validate import Layouts, check_types, dims_of, parse
from mla_compile.torch_internals import is_fake, run_check

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
Table = tuple[Candidate, ...]

lib = torch.library.Library("mla_compile", "DEF")
implementations: dict[str, Callable[..., Any]] = {}
"""The Python function behind each op, by the op's name."""
tables: dict[str, Table] = {}
"""The candidates of each op that has a table, fastest first, by the op's name."""
FLAG = "batch_invariant"
"""The last argument of some ops: it asks for a batch-invariant candidate, and is not passed on to it."""
flagged: set[str] = set()
"""The ops that have this argument."""
_facts_of: dict[str, Callable[[Sequence[Any]], Mapping[str, object]]] = {}

_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    str | None: "str?",
    Sequence[Tensor] | None: "Tensor[]?",
}


def define_op(
    *,
    table: Table = (),
    layouts: Mapping[str, str] | None = None,
    facts: Callable[..., Mapping[str, object]] | None = None,
    operands: Callable[..., Any] | None = None,
    run: Callable[..., Any] | None = None,
    name: str = "",
    mutates: tuple[str, ...] = (),
    static: str = "",
    returns: tuple[str, ...] = (),
    layout: torch.Tag = torch.Tag.needs_fixed_stride_order,
    tags: tuple[torch.Tag, ...] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Define the op `mla_compile::<name>` by the decorated function, which becomes its checked call.

    Args:
        table: its candidates, fastest first; the last one serves every call.
        layouts: of tensors among the arguments (see `validate.Layouts`), checked before the declaration runs. A word of
            a layout is a fact of a call that the candidates' `constraints` may limit. So are "dtype", that of the first
            argument, and "NAME.dtype" and "NAME.stride(1)" of the others.
        facts: computes more facts, from the arguments of the op that it names as parameters; the last ones may be
            absent, if they have defaults.
        operands: makes the record of the op's arguments that the candidates take. By default they take the record that
            the declaration takes, else the arguments by position. `batch_invariant` is not among them.
        run: a function to run instead of the table's choice, with all of the op's arguments by position.
        name: of the op; by default that of the function.
        mutates: the arguments that are written to. Without it an op that mutates is removed as dead code, silently.
        static: the integer argument that a graph is compiled for; others may be symbols.
        returns: names for the tensors of a tuple.
        layout: which strides of arguments Inductor keeps. By default their order, which is all that an op may rely on;
            `flexible_layout` for an op that takes any. Torch's default is to keep exact strides, and to copy a tensor
            whose strides may differ: with a symbolic number of rows, n times and max(1, n) times may.
        tags: more tags than this and `pt2_compliant_tag`.
    """

    def declare(declaration: Callable[P, R]) -> Callable[P, R]:
        op = name or declaration.__name__
        parameters, record = parameters_of(declaration)
        make = operands or record
        required = _num_required(parameters)
        defaults = tuple(p.default for p in parameters[required:])
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        positional = len(inspect.signature(declaration).parameters) - len(keywords)
        if any(p.name == FLAG for p in parameters):
            assert parameters[-1].name == FLAG, f"{op}: {FLAG} comes last"
            flagged.add(op)

        def implementation(*args: Any) -> Any:
            args += defaults[len(args) - required :]  # torch leaves out arguments that equal their defaults
            if run is not None:
                return run(*args)
            candidate = serving(op, args)
            flag = args[-1:] if op in flagged else ()
            others = args[: len(args) - len(flag)]
            given = others if make is None else (make(*others),)
            return candidate.load()(*given, *(flag if candidate.accepts_flag else ()))

        def fake(*args: Any) -> Any:
            if layouts is not None:
                Layouts().tensors(layouts, dict(zip(names, args)))
            given = args
            if record is not None:
                args = (record(*args[: len(record._fields)]), *args[len(record._fields) :])
            try:
                return declaration(*args[:positional], **dict(zip(keywords, args[positional:])))
            except (TypeError, AttributeError):  # only then, as all eager calls run this
                check_types({p.name: (p.annotation, value) for p, value in zip(parameters, given)})
                raise

        names = [p.name for p in parameters]
        tables[op], implementations[op] = table, implementation
        _facts_of[op] = _facts_reader(table, names, layouts or {}, facts)
        schema = schema_of(op, declaration, mutates=mutates, static=static, returns=returns)
        lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, layout, *tags))
        lib.impl(op, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mla_compile::{op}", fake, lib=lib)
        return _checked(declaration, parameters, getattr(torch.ops.mla_compile, op).default, fake)

    return declare


def _facts_reader(
    table: Table,
    names: list[str],
    layouts: Mapping[str, str],
    more: Callable[..., Mapping[str, object]] | None,
) -> Callable[[Sequence[Any]], Mapping[str, object]]:
    """A function that reads the facts of a call from its arguments, which have these names."""
    limited = {fact for candidate in table for fact in candidate.constraints}
    readers = {fact: read for fact in limited if (read := _reader(fact, names, layouts))}
    wanted = [names.index(argument) for argument in inspect.signature(more).parameters] if more else []

    def facts(args: Sequence[Any]) -> dict[str, object]:
        found = {fact: read(args) for fact, read in readers.items()}
        return found if more is None else {**found, **more(*(args[i] for i in wanted if i < len(args)))}

    return facts


def _reader(
    fact: str, names: list[str], layouts: Mapping[str, str]
) -> Callable[[Sequence[Any]], object] | None:
    """A function that reads a fact from the arguments; None if their layouts do not contain it."""
    for name, layout in layouts.items():
        i, words = names.index(name), [word for word, _ in dims_of(parse(layout)[1])]
        if fact in words:
            dim = words.index(fact)
            return lambda args: args[i].shape[dim]
        if fact in ("dtype", f"{name}.dtype"):
            return lambda args: args[i].dtype
        if stride := re.fullmatch(rf"{name}\.stride\((\d)\)", fact):
            dim = int(stride[1])
            return lambda args: None if args[i] is None else args[i].stride(dim)
    return None


def schema_of(
    op: str,
    declaration: Callable[..., Any],
    *,
    mutates: tuple[str, ...] = (),
    static: str = "",
    returns: tuple[str, ...] = (),
) -> str:
    """The schema of an op, from the signature of its declaration. All arguments are positional."""
    parameters, _ = parameters_of(declaration)
    arguments = []
    for i, p in enumerate(parameters):
        kind = _TYPES[p.annotation]
        if p.name in mutates:
            kind = kind.replace("Tensor", f"Tensor({'ab'[mutates.index(p.name)]}!)")
        elif p.name == static:
            kind = "int"
        arguments.append(f"{kind} {p.name}" + (f"={p.default}" if i >= _num_required(parameters) else ""))
    single = {Tensor: "Tensor", list[Tensor]: "Tensor[]"}
    results = (
        single.get(inspect.signature(declaration).return_annotation)
        or f"({', '.join(f'Tensor {x}' for x in returns)})"
    )
    return f"{op}({', '.join(arguments)}) -> {results}"


def parameters_of(declaration: Callable[..., Any]) -> tuple[list[inspect.Parameter], Any]:
    """The parameters of an op. A named tuple as first parameter stands for its fields and is returned too."""
    first, *others = inspect.signature(declaration).parameters.values()
    if not hasattr(first.annotation, "_fields"):
        return [first, *others], None
    return [*inspect.signature(first.annotation).parameters.values(), *others], first.annotation


def _num_required(parameters: list[inspect.Parameter]) -> int:
    """Number of arguments that a call by position needs: a default counts if all later ones have one too."""
    return 1 + max(i for i, p in enumerate(parameters) if p.default is p.empty)


def _checked(
    declaration: Callable[P, R],
    parameters: list[inspect.Parameter],
    op: Callable[..., Any],
    check: Callable[..., Any],
) -> Callable[P, R]:
    """A function with the op's parameters that runs `check` on them, then the op.

    check: the declaration, with arguments by position.
    """
    names = [(p.name, () if p.default is p.empty else (p.default,)) for p in parameters]

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # By position, as in the nodes of a graph.
        rest: list[object] = []
        for name, default in names[len(args) :]:
            if name not in kwargs and not default:
                raise TypeError(f"{declaration.__name__}() is missing the argument {name!r}")
            rest.append(kwargs.pop(name, *default))
        if kwargs:
            raise TypeError(f"{declaration.__name__}() has no argument {next(iter(kwargs))!r}")
        run_check(check, *args, *rest)
        result: R = op(*args, *rest)
        return result

    # A code object of its own: Dynamo keeps compiled versions per code object, and refuses a ninth.
    call.__code__ = call.__code__.replace(co_name=declaration.__name__)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return functools.wraps(declaration)(call)


def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """The result of a declaration: while compiling an empty tensor on the device of `like`.

    An eager call runs the declaration for its checks alone, so `like` is returned and nothing is allocated.
    """
    if like.device.type == "meta" or is_fake(like):
        return like.new_empty(shape, dtype=dtype or like.dtype)
    return like


def choose(op: str, args: Sequence[Any]) -> Selection[Candidate]:
    """The candidate that serves a call of an op with these arguments, and why the faster ones do not."""
    return select(tables[op], call_of(op, args))


def serving(op: str, args: Sequence[Any]) -> Candidate:
    """The candidate that `choose` gives. Reasons are left out: they would cost an eager call more than the choice."""
    here = _candidates_on(op, args[0].device, _is_asked(op, args))
    if log.isEnabledFor(logging.DEBUG):
        _log_once(op, choose(op, args).explain())
    if len(here) == 1:
        return here[0]
    facts = facts_of(op, args)
    return next(candidate for candidate in here if candidate.why_not_given(facts) is None)


def call_of(op: str, args: Sequence[Any]) -> Call:
    """The `Call` of an op with these arguments."""
    device = describe_device(args[0].device)
    return Call(*device, facts=facts_of(op, args), batch_invariant=_is_asked(op, args))


def facts_of(op: str, args: Sequence[Any]) -> Mapping[str, object]:
    """The facts of these arguments that an op's candidates may limit."""
    return _facts_of[op](args)


def _is_asked(op: str, args: Sequence[Any]) -> bool:
    return op in flagged and args[-1] is True  # a flag that is left out is not the last argument


@functools.cache
def _candidates_on(op: str, device: torch.device, batch_invariant: bool) -> Table:
    suited = [candidate for candidate in tables[op] if candidate.batch_invariant or not batch_invariant]
    return tuple(candidate for candidate in suited if candidate.why_not_on(*describe_device(device)) is None)


@functools.cache
def _log_once(op: str, explanation: str) -> None:
    log.debug("candidates of %s:\n%s", op, explanation)
