"""Generation from token ids (`engine`) and from text (`text`)."""

from mla_compile.engine.buckets import Bucket, CaptureReport
from mla_compile.engine.completion import Completion
from mla_compile.engine.engine import Engine
from mla_compile.engine.generation import Generation, TokenChooser
from mla_compile.engine.grammar import Grammar
from mla_compile.engine.reports import Logprob
from mla_compile.engine.stats import EngineStats
from mla_compile.engine.text import Checkpoint, TextStream, fitting_engine, generate

__all__ = [
    "Bucket",
    "CaptureReport",
    "Checkpoint",
    "Completion",
    "Engine",
    "EngineStats",
    "Generation",
    "Grammar",
    "Logprob",
    "TextStream",
    "TokenChooser",
    "fitting_engine",
    "generate",
]
