"""Names full blocks by what is in them and before them. Knows token ids: no blocks of the pool, no groups.

The names are cryptographic digests, since whoever could make two prompts collide would read another one's KV.
"""

from array import array
from hashlib import blake2b

from jaxllm.scheduler.request import Request


def root_digest(cache_salt: str | None, kv_key: tuple[str, ...]) -> bytes:
    """Starts the chain of a request: whatever changes the KV of equal tokens, or must not be shared, goes in here."""
    return blake2b(repr((cache_salt, kv_key)).encode()).digest()


def block_hashes(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """Gives the digests of at least the first `num_blocks` blocks; each is computed once in the life of a request."""
    hashes = request.block_hashes
    num_before = len(hashes)
    if num_before >= num_blocks:
        return hashes
    parent = hashes[-1] if hashes else root_digest(request.cache_salt, request.kv_key)
    content = array("i", _known_tokens(request, num_before * block_size, num_blocks * block_size)).tobytes()
    step = len(content) // (num_blocks - num_before)
    for start in range(0, len(content), step):
        parent = blake2b(parent + content[start : start + step]).digest()
        hashes.append(parent)
    return hashes


def _known_tokens(request: Request, start: int, end: int) -> list[int]:
    num_prompt = request.num_prompt
    if start >= num_prompt:
        return request.output_ids[start - num_prompt : end - num_prompt]
    return request.prompt_ids[start:end] + request.output_ids[: max(end - num_prompt, 0)]
