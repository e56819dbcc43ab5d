"""OpenAI's HTTP API over AsyncLLM. Knows HTTP and JSON; no scheduling, no arrays."""
