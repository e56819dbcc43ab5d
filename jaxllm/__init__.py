"""jaxllm: an LLM inference and serving engine in JAX. Names are loaded at first use, so that importing it is quick."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.api.async_llm import AsyncLLM
    from jaxllm.api.llm import LLM
    from jaxllm.api.logprobs import FlatLogprobs, Logprob
    from jaxllm.api.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        ContinuationScore,
        OutputDelta,
        RequestOutput,
    )
    from jaxllm.config.logits_processor import LogitsProcessor
    from jaxllm.config.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxllm.mesh.axes import AxisRules
    from jaxllm.models.shardings import param_shardings
    from jaxllm.planning.call import plan

__all__ = [
    "LLM",
    "AsyncLLM",
    "AxisRules",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ContinuationScore",
    "FlatLogprobs",
    "LogitsProcessor",
    "Logprob",
    "OutputDelta",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
    "param_shardings",
    "plan",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxllm.api.llm",
    "AsyncLLM": "jaxllm.api.async_llm",
    "AxisRules": "jaxllm.mesh.axes",
    "BeamSearchOutput": "jaxllm.api.outputs",
    "BeamSearchSequence": "jaxllm.api.outputs",
    "CompletionOutput": "jaxllm.api.outputs",
    "ContinuationScore": "jaxllm.api.outputs",
    "FlatLogprobs": "jaxllm.api.logprobs",
    "Logprob": "jaxllm.api.logprobs",
    "OutputDelta": "jaxllm.api.outputs",
    "RequestOutput": "jaxllm.api.outputs",
    "BeamSearchParams": "jaxllm.config.sampling_params",
    "LogitsProcessor": "jaxllm.config.logits_processor",
    "RequestOutputKind": "jaxllm.config.sampling_params",
    "SamplingParams": "jaxllm.config.sampling_params",
    "param_shardings": "jaxllm.models.shardings",
    "plan": "jaxllm.planning.call",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
