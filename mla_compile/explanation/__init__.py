"""`mla_compile.explain`: what the passes make of a model, as text and as a picture."""

from mla_compile.explanation.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
