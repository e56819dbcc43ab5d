"""What Python programs call: LLM (in their own thread) and AsyncLLM (its own thread). Knows text; no HTTP."""
