"""Runs MLA models of Hugging Face transformers unedited, on paged latents with MTP speculation."""

from mla_compile.integrations.transformers.accelerate import accelerate, restore
from mla_compile.integrations.transformers.mtp import LongcatMtpLayer

__all__ = ["LongcatMtpLayer", "accelerate", "restore"]
