"""What limits an engine, from what it measured. Knows figures and rules; starts no engine."""
