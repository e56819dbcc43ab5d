"""Choosing a token from logits, one row per request."""
