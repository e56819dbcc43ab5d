"""From the projection to attention's inputs in one pass: bias, head norms, rotary embedding, KV write."""
