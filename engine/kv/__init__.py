"""KV cache: blocks, prefix hits, formats, and transfers to and from elsewhere."""
