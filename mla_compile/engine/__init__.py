"""Generation from token ids (`engine`) and from text (`text`)."""

from mla_compile.engine.completion import Completion
from mla_compile.engine.engine import Engine, TokenChooser
from mla_compile.engine.text import Checkpoint, TextStream, fitting_engine, generate, warm_up

__all__ = [
    "Checkpoint",
    "Completion",
    "Engine",
    "TextStream",
    "TokenChooser",
    "fitting_engine",
    "generate",
    "warm_up",
]
