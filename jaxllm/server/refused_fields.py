"""Fields of requests whose feature is not built yet: refused, never accepted in silence. Knows names and values."""

import logging
from collections.abc import Mapping

from jaxllm.server.errors import ApiError

logger = logging.getLogger(__name__)

# The values that ask for nothing, besides None. A field that one kind of request has is refused in the other.
REFUSED_FIELDS: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "chat_template": (),
    "documents": ([],),  # a completion has no template
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ([],),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
}

# What OpenAI's clients send that changes no answer here.
_HARMLESS = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        "parallel_tool_calls",
    )
)


def check_extra_fields(fields: Mapping[str, object] | None) -> None:
    """Looks through the fields that a request has besides those built; unknown ones are ignored with a warning.

    Raises:
        ApiError: one of them asks for what does not exist yet.
    """
    for name, value in (fields or {}).items():
        if name in REFUSED_FIELDS:
            neutral = REFUSED_FIELDS[name]
            if value is not None and not any(_same(value, each) for each in neutral):
                hint = f" or at {neutral[0]!r}" if neutral else ""
                raise ApiError(f"{name}={value!r:.80} is not supported yet; leave it out{hint}", param=name)
        elif name not in _HARMLESS:
            logger.warning("ignored the unknown field %.80r of a request", name)


def _same(value: object, neutral: object) -> bool:
    """Compares as JSON does: true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
