"""Decoder models: their configuration, modules, families and weights. Knows no requests and no scheduler."""
