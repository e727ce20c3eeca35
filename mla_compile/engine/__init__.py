"""Generation from token ids (`engine`) and from text (`text`)."""

from mla_compile.engine.buckets import Bucket, CaptureReport
from mla_compile.engine.completion import Completion
from mla_compile.engine.config import EngineConfig
from mla_compile.engine.detokenizer import TextStream
from mla_compile.engine.engine import Engine
from mla_compile.engine.follow import follow
from mla_compile.engine.grammar import Grammar
from mla_compile.engine.reports import Logprob
from mla_compile.engine.request import Request, TokenChooser
from mla_compile.engine.stats import EngineStats
from mla_compile.engine.text import Checkpoint, fitting_engine, generate

__all__ = [
    "Bucket",
    "CaptureReport",
    "Checkpoint",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Grammar",
    "Logprob",
    "Request",
    "TextStream",
    "TokenChooser",
    "fitting_engine",
    "follow",
    "generate",
]
