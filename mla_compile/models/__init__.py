"""Models that call the unified op, and the loading of Hugging Face checkpoints into them."""

from mla_compile.models.checkpoint import load_model as load_model
from mla_compile.models.deepseek import MLAForCausalLM as MLAForCausalLM
from mla_compile.models.parallel import Parallel as Parallel
from mla_compile.models.tokenizer import load_tokenizer as load_tokenizer
