"""Text to token ids and back. Knows no model, no engine and no device."""
