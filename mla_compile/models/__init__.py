"""Models that call the unified op, and the loading of Hugging Face checkpoints into them."""

from mla_compile.models.checkpoint import load_model, load_tokenizer
from mla_compile.models.deepseek import MLAForCausalLM

__all__ = ["MLAForCausalLM", "load_model", "load_tokenizer"]
