"""What `absorb_mla` needs: seeing MLA through the way it is written, deciding, and emitting the absorbed form."""
