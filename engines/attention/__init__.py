"""Attention over the paged KV cache, one file per backend; `sdpa` is the reference that others are tested against."""
