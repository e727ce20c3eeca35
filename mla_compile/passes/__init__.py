"""Graph passes, one idea a file. `pipeline.PASSES` lists them in order."""

from mla_compile.passes.pipeline import PASSES

__all__ = ["PASSES"]
