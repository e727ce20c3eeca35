"""Generation from token ids (`engine`) and from text (`text`)."""

from mla_compile.engine.buckets import Bucket as Bucket
from mla_compile.engine.buckets import CaptureReport as CaptureReport
from mla_compile.engine.completion import Completion as Completion
from mla_compile.engine.config import EngineConfig as EngineConfig
from mla_compile.engine.detokenizer import TextStream as TextStream
from mla_compile.engine.engine import Engine as Engine
from mla_compile.engine.follow import follow as follow
from mla_compile.engine.grammar import Grammar as Grammar
from mla_compile.engine.reports import Logprob as Logprob
from mla_compile.engine.request import Request as Request
from mla_compile.engine.request import TokenChooser as TokenChooser
from mla_compile.engine.stats import EngineStats as EngineStats
from mla_compile.engine.text import Checkpoint as Checkpoint
from mla_compile.engine.text import fitting_engine as fitting_engine
from mla_compile.engine.text import generate as generate
