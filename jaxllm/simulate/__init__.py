"""The real scheduler before a device that is a formula: traffic said beforehand. Starts no engine, reads no weights."""
