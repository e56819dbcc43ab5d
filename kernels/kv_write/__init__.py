"""Writing a step's keys and values into the paged KV cache."""
