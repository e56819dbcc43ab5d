"""Refuses the requests that could never run to their end. Knows limits and lengths: no queue."""

from collections.abc import Sequence

from jaxllm.scheduler.kv_cache import KVCache
from jaxllm.scheduler.request import Request, RequestStatus


class AdmissionError(ValueError):
    """A request that could never run: the message is one line with the cause and the numbers."""


def check_new(requests: Sequence[Request]) -> None:
    """Checks that requests have never run and, if there are several, that they are samples of one prompt.

    Raises:
        AdmissionError: one has run before, or two differ in what makes their KV.
    """
    first = requests[0]
    for request in requests:
        if request.status is not RequestStatus.WAITING or request.output_ids:
            raise AdmissionError(f"request {request.request_id!r} has run before; make a new one")
        if request.prompt_ids != first.prompt_ids:
            raise AdmissionError(f"requests {first.request_id!r} and {request.request_id!r} have different prompts")
        if (request.cache_salt, request.kv_key) != (first.cache_salt, first.kv_key):
            raise AdmissionError(
                f"requests {first.request_id!r} and {request.request_id!r} differ in cache_salt or kv_key: "
                "they cannot share a prompt"
            )


def checked_max_new_tokens(request: Request, max_model_len: int, kv: KVCache) -> int:
    """Gives the request's max_new_tokens, clipped to the room that max_model_len leaves behind its prompt.

    Raises:
        AdmissionError: the request is malformed, or longer than the model or the whole cache can take.
    """
    num_prompt = len(request.prompt_ids)
    if not num_prompt:
        raise AdmissionError("the prompt is empty; it needs at least 1 token")
    if request.max_new_tokens < 1:
        raise AdmissionError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    if num_prompt > max_model_len - 1:
        raise AdmissionError(
            f"the prompt has {num_prompt} tokens, but max_model_len {max_model_len} leaves room for "
            f"{max_model_len - 1} (and one output token): shorten the prompt or raise max_model_len"
        )
    max_new_tokens = min(request.max_new_tokens, max_model_len - num_prompt)
    pool, groups = kv.pool, kv.groups
    num_needed = groups.num_blocks(num_prompt + max_new_tokens, pool.block_size, kv.chunk)
    if num_needed > pool.num_lendable:
        raise AdmissionError(
            f"the request may need {num_needed} KV blocks ({num_prompt} prompt + {max_new_tokens} output tokens, "
            f"{pool.block_size} a block, {len(groups)} KV group{'s' if len(groups) > 1 else ''}), but the cache has "
            f"{pool.num_lendable}: lower max_new_tokens, shorten the prompt or enlarge the cache"
        )
    return max_new_tokens
