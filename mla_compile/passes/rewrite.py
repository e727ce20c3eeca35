"""The driver of all fusing passes: it walks the graph, logs what was fused and what was not, and removes dead nodes."""

import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

import torch
from torch import fx

from mla_compile.passes.effects import erase_dead
from mla_compile.passes.provenance import where

_MAX_SOURCES = 3
_Found = TypeVar("_Found")


class Refusal(Exception):
    """The reason why a pass does not rewrite a call, for the author of the model."""


def rewrite(graph: fx.Graph, is_anchor: Callable[[fx.Node], bool], fuse: Callable[[fx.Node], object]) -> None:
    """Call `fuse` on the anchors of a graph, in order; a graph without anchors is left untouched.

    fuse: matches at an anchor, replaces nodes and returns what it found, for the log; None writes no line. It may raise
        a `Refusal` before it changes the graph. It runs under `torch.no_grad()`, as the nodes that it replaces need no
        gradient.
    """
    if not any(map(is_anchor, graph.nodes)):
        return
    log = logging.getLogger(fuse.__module__)
    erase_dead(graph)  # so that every user counts
    for node in list(filter(is_anchor, graph.nodes)):
        try:
            with torch.no_grad():
                found = fuse(node)
        except Refusal as reason:
            log.info("not fused: %s: %s", where(node), reason)
            continue
        if found is not None:
            log.info("fused: %s: %s", where(node), found)
    erase_dead(graph)


def first_match(sources: Iterable[fx.Node], match: Callable[[fx.Node], _Found], otherwise: str) -> _Found:
    """The result of `match` for the first source that it does not refuse.

    sources: the nearest first, for example the output of a projection and tensors computed from it.

    Raises:
        Refusal: that of the nearest source; `otherwise` if there are no sources.
    """
    reason = None
    for source in islice(sources, _MAX_SOURCES):
        try:
            return match(source)
        except Refusal as refusal:
            reason = reason or refusal
    raise reason or Refusal(otherwise)
