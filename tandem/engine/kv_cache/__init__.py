"""The KV cache: the arena, its extents, shared prefixes, and which tokens of a sequence are computed."""
