"""Models that call the unified op, and the loading of Hugging Face checkpoints into them."""

from mla_compile.models.checkpoint import load_model
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.parallel import Parallel
from mla_compile.models.tokenizer import load_tokenizer

__all__ = ["MLAForCausalLM", "Parallel", "load_model", "load_tokenizer"]
