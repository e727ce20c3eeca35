"""`mla_compile.explain`: the effect of the passes on a model, as text and as a picture."""

from mla_compile.explanation.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
