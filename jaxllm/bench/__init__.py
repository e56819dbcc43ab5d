"""Measuring the engine with fixed workloads. Knows LLM's interface; nothing in the engine knows of it."""
