"""`mla_decode` for Hopper in bfloat16, kv_lora_rank 512, rope 64, with separate warps for loads and for computation.

`decode` launches; `split` divides the keys of all rows among the multiprocessors and joins the parts; `narrow` computes
up to 32 queries at a time (up to 64 in batch-invariant calls), `wide` 64.
"""
