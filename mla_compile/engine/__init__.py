"""Generation of text from token ids."""

from mla_compile.engine.engine import Completion, Engine

__all__ = ["Completion", "Engine"]
