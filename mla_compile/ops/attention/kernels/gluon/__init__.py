"""`mla_decode` for Hopper in bfloat16, kv_lora_rank 512, rope 64: warps that load beside warps that compute.

`decode` launches; `split` shares the keys of all rows among the multiprocessors and joins the parts; `narrow` attends
with up to 32 query rows at a time, `wide` with 64.
"""
