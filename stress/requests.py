"""Requests of clients: bodies in OpenAI's form, sampling parameters and grammars, valid and changed.

A body is understood, so that the engine can take it, or refused by the name of its field. Parameters are valid or
refused by name. A random regular expression, JSON schema or grammar compiles, and then every text that random choices
among the allowed tokens give follows it, with the same masks for drafts as without; or it is refused by name.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mla_compile import Grammar, MLAError, SamplingParams
from mla_compile.engine import Completion
from mla_compile.engine.grammar import GrammarRow, allowed_tokens
from mla_compile.serving.failures import BadRequest
from stress.runner import Case, Draw, check_message, command
from tests.engine.test_grammar import EOS, SMALL
from tests.engine.test_wrong_types import WRONG
from tests.models_for_tests import VOCAB
from tests.serving.test_openai_requests import (
    CHATTING,
    LIMITS,
    VALID,
    VALUES,
    check_asked,
    check_refusal,
    mutate,
    mutate_bytes,
)

ALPHABET = 'abcdtrue{}":,-0123456789=!'
"""What the small tokenizer spells."""


def body(draw: Draw) -> str:
    value, parse = draw.choice(VALID)
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = mutate(value, draw)
    sent = json.dumps(value).encode()
    if draw.random() < 0.3:
        sent = mutate_bytes(sent, draw)
    draw.note(parse.__name__, sent[:500])
    try:
        check_asked(parse(sent, tokenizer=CHATTING, limits=LIMITS))
    except BadRequest as error:
        check_refusal(error)
        return "body, refused"
    return "body, understood"


def parameters(draw: Draw) -> str:
    names = [field.name for field in fields(SamplingParams)]
    given = {
        name: draw.choice(draw.choice((WRONG, VALUES))) for name in draw.sample(names, draw.randint(1, 3))
    }
    draw.note({name: f"{value!r:.60}" for name, value in given.items()})
    try:
        params = SamplingParams(**given)
    except MLAError as error:
        check_message(error, rf"({'|'.join(given)})\b")
        return "parameters, refused"
    assert params == SamplingParams(**{name: getattr(params, name) for name in names})
    return "parameters, valid"


def regex(draw: Draw, depth: int = 0) -> str:
    """In the syntax that Python and Rust share."""
    kind = draw.randrange(4 if depth > 2 else 9)
    if kind < 2:
        return "".join(re.escape(draw.choice(ALPHABET)) for _ in range(draw.randint(1, 3)))
    if kind == 2:
        return f"[{''.join(draw.sample('abcd0123', draw.randint(1, 4)))}]"
    if kind == 3:
        return draw.choice(("[a-d]", "[0-9]", "(true|12)", "[^a]", "a?"))
    one, other = regex(draw, depth + 1), regex(draw, depth + 1)
    low = draw.randrange(3)
    repeat = draw.choice(("?", "*", "+", f"{{{low},{low + draw.randrange(3)}}}", f"{{{low}}}"))
    return draw.choice((one + other, f"({one}|{other})", f"({one}){repeat}"))


def schema(draw: Draw, depth: int = 0) -> dict[str, Any]:
    kind = draw.randrange(5 if depth > 1 else 8)
    if kind == 0:
        low = draw.randint(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(300)}
    if kind == 1:
        return {"enum": [draw.choice(("abcd", "cab", 12, True, "")) for _ in range(draw.randint(1, 3))]}
    if kind == 2:
        return {"type": "boolean"}
    if kind == 3:
        return {"type": "string", "pattern": f"^{draw.choice(('[a-d]{1,3}', '(ab|cd)+', '[0-9]?'))}$"}
    if kind == 4:
        return {"const": draw.choice(("a", 1, True))}
    if kind == 5:
        most = draw.randint(0, 3)
        return {
            "type": "array",
            "items": schema(draw, depth + 1),
            "minItems": draw.randint(0, most),
            "maxItems": most,
        }
    names = draw.sample("abcd", draw.randint(0, 3))
    required = [name for name in names if draw.random() < 0.7]
    properties = {name: schema(draw, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def is_of(value: Any, rule: dict[str, Any]) -> bool:
    """Whether a JSON value follows a `schema`."""
    if "enum" in rule or "const" in rule:
        return any(type(value) is type(one) and value == one for one in rule.get("enum", [rule.get("const")]))
    match rule["type"]:
        case "integer":
            return type(value) is int and rule["minimum"] <= value <= rule["maximum"]
        case "boolean":
            return type(value) is bool
        case "string":
            return isinstance(value, str) and re.search(rule["pattern"], value) is not None
        case "array":
            fits = isinstance(value, list) and rule["minItems"] <= len(value) <= rule["maxItems"]
            return fits and all(is_of(one, rule["items"]) for one in value)
    properties = rule["properties"]
    fits = isinstance(value, dict) and set(rule["required"]) <= value.keys() <= properties.keys()
    return fits and all(is_of(one, properties[name]) for name, one in value.items())


PAIR = r"[a-d]{1,4}=(true|[0-9]{1,3})"
EBNF = (
    (
        'start: pair ("," pair)~1..3\npair: WORD "=" ("true" | /[0-9]{1,3}/)\nWORD: /[a-d]{1,4}/',
        f"{PAIR}(,{PAIR}){{1,3}}",
    ),
    ('start: "a" start "b" | "c"', "a*cb*"),
    ('start: A+ B?\nA: "ab" | "cd"\nB: /!+/', r"(ab|cd)+!*"),
)
"""Grammars, and regular expressions that their texts match."""


def drawn_grammar(draw: Draw) -> tuple[Callable[..., Grammar], Any, Callable[[str], bool]]:
    """How to compile a grammar, its source, and whether a text follows it."""
    match draw.randrange(3):
        case 0:
            source = regex(draw)
            return Grammar.from_regex, source, lambda text: re.fullmatch(source, text, re.DOTALL) is not None
        case 1:
            rule = schema(draw)
            return Grammar.from_json_schema, rule, lambda text: is_of(json.loads(text), rule)
        case _:
            rules, pattern = draw.choice(EBNF)
            return Grammar.from_ebnf, rules, lambda text: re.fullmatch(pattern, text) is not None


def grammar(draw: Draw) -> str:
    compile_source, source, follows = drawn_grammar(draw)
    is_changed = draw.random() < 0.4
    if is_changed:
        text = source if isinstance(source, str) else json.dumps(source)
        source = mutate_bytes(text.encode(), draw).decode(errors="replace")
    draw.note(compile_source.__name__, source)
    try:
        compiled = compile_source(source, SMALL)
    except MLAError as error:
        check_message(error, "(json_schema|regex|ebnf): expected ")
        return "grammar, refused"
    completion, ended = walk(draw, compiled)
    spelt = str(SMALL.decode(completion))
    draw.note("tokens", completion, spelt)
    if ended and not is_changed:
        assert follows(spelt), f"{spelt!r} does not follow the grammar"
    return "grammar, a whole text" if ended else "grammar, the beginning of a text"


def masks(compiled: Grammar, before: list[int], drafts: list[int]) -> Tensor:
    row = GrammarRow(compiled, Completion(token_ids=list(before)), [EOS])
    return allowed_tokens({0: row}, torch.tensor([drafts], dtype=torch.int64), vocab_size=VOCAB)[0]


def walk(draw: Draw, compiled: Grammar, most: int = 24) -> tuple[list[int], bool]:
    """Tokens that are allowed one after the other, and whether they end; the masks are those of drafts too."""
    row = GrammarRow(compiled, completion := Completion(), [EOS])
    one_by_one: list[Tensor] = []
    ended = False
    while len(completion.token_ids) < most and not ended:
        mask = allowed_tokens({0: row}, torch.empty(1, 0, dtype=torch.int64), vocab_size=VOCAB)[0, 0]
        assert mask.any()
        one_by_one.append(mask)
        token = int(draw.choice(mask.nonzero().flatten().tolist()))
        ended = token == EOS
        completion.token_ids += [] if ended else [token]
    tokens = completion.token_ids
    start = draw.randrange(len(one_by_one))
    drafts = tokens[start : start + draw.randint(1, 4)]
    found = masks(compiled, tokens[:start], drafts)
    for j, mask in enumerate(one_by_one[start : start + len(drafts) + 1]):
        assert torch.equal(found[j], mask), f"another mask after {j} drafts"
    is_whole = ended and row._dead_end is None  # private: only `settle` tells, with a step's report
    return tokens, is_whole


@cache
def case() -> Case:
    kinds = (body, parameters, grammar)
    return lambda draw: draw.choices(kinds, (7, 1, 2))[0](draw)


def make(_: argparse.Namespace) -> Case:
    return case()


def main() -> None:
    command("requests", make)


if __name__ == "__main__":
    main()
