"""Docstrings of this project, as the API pages render them: lines that describe attributes become lists.

    seq_lens: keys visible to a row's last              - **`seq_lens`**: keys visible to a row's last
        valid query token                                   valid query token
    q_len: query tokens per row                 -->     - **`q_len`**: query tokens per row

And in `Args:`, a line for several arguments becomes one for each: the parser knows only single names.
"""

import re
from typing import Any

from griffe import Extension, Object

_NAMES = r"\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*"
_ATTRIBUTE = re.compile(rf"({_NAMES}): (.+)")
_SEVERAL = re.compile(rf"    ({_NAMES}): (.+(?:\n        .*)*)")


def render(text: str) -> str:
    """A docstring with its line-by-line attributes as lists, and its `Args:` with one name an entry."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(_arguments(p) if p.startswith("Args:\n") else _attributes(p) for p in paragraphs)


def _attributes(paragraph: str) -> str:
    """A list, if the first line of the paragraph describes an attribute; other paragraphs unchanged."""
    if _ATTRIBUTE.match(paragraph) is None:
        return paragraph
    return "\n".join(map(_item, paragraph.splitlines()))


def _item(line: str) -> str:
    found = _ATTRIBUTE.fullmatch(line)
    if found is None:
        return line
    names = ", ".join(f"**`{name}`**" for name in found[1].split(", "))
    return f"- {names}: {found[2]}"


def _arguments(section: str) -> str:
    return _SEVERAL.sub(lambda of: "\n".join(f"    {name}: {of[2]}" for name in of[1].split(", ")), section)


class Lists(Extension):
    """Renders every docstring of what is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Once for each class, function, attribute and module."""
        if obj.docstring is not None:
            obj.docstring.value = render(obj.docstring.value)
