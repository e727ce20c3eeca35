"""Where our custom ops are defined: one `torch.library.Library`, one way to add an op to it.

An op is declared once, by the layouts of its tensors and a function with its arguments, which checks what layouts do
not say and returns an empty result:

    @define_op(table=APPEND, layouts={"kv_c": "tokens, kv_lora_rank", ...}, mutates=("kv_cache",))
    def mla_append(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        ...checks...

Its signature is the schema's source; while compiling it is the op's fake implementation; in eager calls it is the
check before the op runs. An argument that is not as its docstring says raises `MLAError`, by name. What runs is the
first row of the table that takes the call.

`Library.define` is used instead of `torch.library.custom_op` because a call takes less than half as long. It checks
nothing for us, so every op has an `opcheck` test.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from mla_compile.ops.dispatch import Call, Candidate, Selection, describe_device, select
from mla_compile.ops.validate import Layouts, dims_of, parse
from mla_compile.torch_internals import is_fake, run_check

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
Table = tuple[Candidate, ...]

lib = torch.library.Library("mla_compile", "DEF")
implementations: dict[str, Callable[..., Any]] = {}
"""The Python function behind each op, by the op's name."""
tables: dict[str, Table] = {}
"""The implementations of each op that has a table, fastest first, by the op's name."""
FLAG = "batch_invariant"
"""The argument of an op, its last one, that asks for a row of its table that is so. The row does not get it."""
flagged: set[str] = set()
"""The ops that have it."""
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
        table: its implementations, fastest first; the last one takes every call.
        layouts: of tensors among the arguments (see `validate.Layouts`), which are checked before the declaration runs.
            A word of them is a fact of a call, what the rows' `constraints` speak of; so are "dtype", that of the first
            argument, and "NAME.dtype" and "NAME.stride(1)" of the others.
        facts: more facts, made of those of the op's arguments that `facts` has parameters for.
        operands: makes one record of the op's arguments, which is what the rows take; by default that which the
            declaration takes, else these by position. `batch_invariant` is none of them.
        run: what to run instead of the table's choice, with all of the op's arguments by position.
        name: of the op; by default that of the function.
        mutates: the arguments that are written to. An op that mutates without saying so is removed as dead code,
            silently.
        static: the integer argument that a graph is compiled for; others may be symbols.
        returns: names for the tensors of a tuple.
        layout: which strides of arguments Inductor keeps. By default their order, which is all that an op may rely on;
            `flexible_layout` for an op that takes any. What torch would do by default is to keep them as they are, and
            copy what has others or may have: of unknown rows, n times and max(1, n) times are not the same.
        tags: beside this and `pt2_compliant_tag`.
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
            row = serving(op, args)
            asked = args[-1:] if op in flagged else ()
            taken = args[: len(args) - len(asked)]
            given = taken if make is None else (make(*taken),)
            return row.load()(*given, *(asked if row.accepts_flag else ()))

        def fake(*args: Any) -> Any:
            if layouts is not None:
                Layouts().tensors(layouts, dict(zip(names, args)))
            if record is not None:
                args = (record(*args[: len(record._fields)]), *args[len(record._fields) :])
            return declaration(*args[:positional], **dict(zip(keywords, args[positional:])))

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
    """What gives the facts of a call by its arguments, which have these names."""
    limited = {fact for row in table for fact in row.constraints}
    readers = {fact: read for fact in limited if (read := _reader(fact, names, layouts))}
    wanted = [names.index(argument) for argument in inspect.signature(more).parameters] if more else []

    def facts(args: Sequence[Any]) -> dict[str, object]:
        found = {fact: read(args) for fact, read in readers.items()}
        return found if more is None else {**found, **more(*(args[i] for i in wanted))}

    return facts


def _reader(
    fact: str, names: list[str], layouts: Mapping[str, str]
) -> Callable[[Sequence[Any]], object] | None:
    """What reads a fact of arguments; None where their layouts do not say what it is."""
    for name, layout in layouts.items():
        i, words = names.index(name), [word for word, _ in dims_of(parse(layout)[1])]
        if fact in words:
            dim = words.index(fact)
            return lambda args: args[i].shape[dim]
        if fact in ("dtype", f"{name}.dtype"):
            return lambda args: args[i].dtype
        if fact.startswith(f"{name}.stride("):
            dim = int(fact.removeprefix(f"{name}.stride(").removesuffix(")"))
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
    """The schema of an op, whose arguments are all positional, by the signature of its declaration."""
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
    """Those of an op; a named tuple, the first parameter of a declaration, stands for its fields and is given too."""
    first, *others = inspect.signature(declaration).parameters.values()
    if not hasattr(first.annotation, "_fields"):
        return [first, *others], None
    return [*inspect.signature(first.annotation).parameters.values(), *others], first.annotation


def _num_required(parameters: list[inspect.Parameter]) -> int:
    """How many arguments a call by position must have: a default counts where nothing without one follows."""
    return 1 + max(i for i, p in enumerate(parameters) if p.default is p.empty)


def _checked(
    declaration: Callable[P, R],
    parameters: list[inspect.Parameter],
    op: Callable[..., Any],
    check: Callable[..., Any],
) -> Callable[P, R]:
    """The op, with its parameters, which is checked first.

    check: the declaration, of arguments by position.
    """
    names = [(p.name, () if p.default is p.empty else (p.default,)) for p in parameters]

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # By position, as nodes of a graph have them.
        rest: list[object] = []
        for name, default in names[len(args) :]:
            if name not in kwargs and not default:
                raise TypeError(f"{declaration.__name__}() misses the argument {name!r}")
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
    """What a declaration returns: an empty result on the device of `like`, while compiling.

    An eager call runs the declaration for its checks alone, so nothing is allocated there.
    """
    if like.device.type == "meta" or is_fake(like):
        return like.new_empty(shape, dtype=dtype or like.dtype)
    return like


def choose(op: str, args: Sequence[Any]) -> Selection[Candidate]:
    """Who serves a call of an op with these arguments, and why the faster ones do not."""
    return select(tables[op], call_of(op, args))


def serving(op: str, args: Sequence[Any]) -> Candidate:
    """What `choose` chooses, without the reasons, which would cost an eager call more than the choice."""
    here = _rows_on(op, args[0].device, _is_asked(op, args))
    if log.isEnabledFor(logging.DEBUG):
        _log_once(op, choose(op, args).explain())
    if len(here) == 1:
        return here[0]
    facts = facts_of(op, args)
    return next(row for row in here if row.why_not_given(facts) is None)


def call_of(op: str, args: Sequence[Any]) -> Call:
    """What decides who serves a call of an op with these arguments."""
    device = describe_device(args[0].device)
    return Call(*device, facts=facts_of(op, args), batch_invariant=_is_asked(op, args))


def facts_of(op: str, args: Sequence[Any]) -> Mapping[str, object]:
    """What rows of an op's table may limit, of these arguments."""
    return _facts_of[op](args)


def _is_asked(op: str, args: Sequence[Any]) -> bool:
    return op in flagged and args[-1] is True  # else it was left out


@functools.cache
def _rows_on(op: str, device: torch.device, batch_invariant: bool) -> Table:
    rows = [row for row in tables[op] if row.batch_invariant or not batch_invariant]
    return tuple(row for row in rows if row.why_not_on(*describe_device(device)) is None)


@functools.cache
def _log_once(op: str, explanation: str) -> None:
    log.debug("implementation of %s:\n%s", op, explanation)
