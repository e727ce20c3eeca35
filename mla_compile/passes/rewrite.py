"""What all fusing passes do around a match: walk the graph, log what was fused and what was not, remove dead nodes."""

import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

import torch
from torch import fx

from mla_compile.passes.effects import erase_dead
from mla_compile.passes.provenance import where

_MOST_SOURCES = 3
_Found = TypeVar("_Found")


class Refusal(Exception):
    """Why a call stays as it is, in words for the author of the model."""


def rewrite(graph: fx.Graph, is_anchor: Callable[[fx.Node], bool], fuse: Callable[[fx.Node], object]) -> None:
    """Call `fuse` on the anchors of a graph, in order; a graph without anchors is left untouched.

    fuse: matches at an anchor, puts new nodes in the place of the old ones and returns what it has found, for the log;
        None where there is nothing to say. It may raise a `Refusal` before it changes the graph. Its new nodes replace
        ones that need no gradient, whatever the mode is now.
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
    """What `match` finds for the first of some sources that it does not refuse. They are the nearest first: the output
    of a projection, and what was made of all of it.

    Raises:
        Refusal: of the nearest one; `otherwise` where there is none.
    """
    reason = None
    for source in islice(sources, _MOST_SOURCES):
        try:
            return match(source)
        except Refusal as refusal:
            reason = reason or refusal
    raise reason or Refusal(otherwise)
