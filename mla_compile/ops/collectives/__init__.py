"""All-reduce and all-gather, for small messages through memory that GPUs share."""
