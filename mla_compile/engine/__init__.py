"""Generation from token ids (`engine`) and from text (`text`)."""

from mla_compile.engine.buckets import Bucket, CaptureReport
from mla_compile.engine.completion import Completion
from mla_compile.engine.engine import Engine, TokenChooser
from mla_compile.engine.grammar import Grammar
from mla_compile.engine.reports import Logprob
from mla_compile.engine.text import Checkpoint, TextStream, fitting_engine, generate

__all__ = [
    "Bucket",
    "CaptureReport",
    "Checkpoint",
    "Completion",
    "Engine",
    "Grammar",
    "Logprob",
    "TextStream",
    "TokenChooser",
    "fitting_engine",
    "generate",
]
