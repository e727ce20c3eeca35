"""The matcher of `absorb_mla`: `pattern` finds MLA attention, `layout` traces tensors through views and copies."""
