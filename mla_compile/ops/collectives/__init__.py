"""All-reduce and all-gather through memory that GPUs share."""
