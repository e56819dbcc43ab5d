"""8-bit numbers of the KV cache, to and from wider ones."""
