"""Measuring with fixed workloads. Knows the engine and, for comparison, transformers; nothing else knows of it."""
