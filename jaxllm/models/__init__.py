"""Decoder models: their configuration, modules, families and weights. Knows no requests and no scheduler."""

from jaxllm.models.registry import register

__all__ = ["register"]
