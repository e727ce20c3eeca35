"""A drop-in for Hugging Face transformers: its MLA models, unedited, on paged latents with MTP speculation."""

from mla_compile.integrations.transformers.accelerate import accelerate, restore
from mla_compile.integrations.transformers.mtp import LongcatMtpLayer

__all__ = ["LongcatMtpLayer", "accelerate", "restore"]
