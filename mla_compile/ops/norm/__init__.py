"""RMSNorm, with or without a residual and an all-reduce."""
