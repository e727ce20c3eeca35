"""Tools that look for faults. The package itself does not import them when it serves requests."""

from mla_compile.testing.batch_invariance import BatchInvarianceReport, check_batch_invariance
from mla_compile.testing.shadow import ShadowCheckError, checked_step, shadow_check

__all__ = [
    "BatchInvarianceReport",
    "ShadowCheckError",
    "check_batch_invariance",
    "checked_step",
    "shadow_check",
]
