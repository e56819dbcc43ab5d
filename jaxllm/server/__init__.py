"""OpenAI's HTTP API over an EngineClient. Knows HTTP and JSON; no scheduling, no arrays."""
