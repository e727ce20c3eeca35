"""MLA attention over the paged latent cache: append, decode, prefill, their metadata, and the unified op."""
