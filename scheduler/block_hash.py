"""Names full blocks by what is in them and before them. Knows token ids: no blocks of the pool, no groups.

The names are cryptographic digests, since whoever could make two prompts collide would read another one's KV.
"""

from array import array
from hashlib import blake2b

from jaxllm.scheduler.request import Request

DIGEST_SIZE = 32


def root_digest(cache_salt: str | None, kv_key: tuple[str, ...]) -> bytes:
    """Starts the chain of a request: whatever changes the KV of equal tokens, or must not be shared, goes in here."""
    return blake2b(repr((cache_salt, kv_key)).encode(), digest_size=DIGEST_SIZE).digest()


def block_hashes(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """Gives the digests of at least the first `num_blocks` blocks; each is computed once in the life of a request."""
    hashes = request.block_hashes
    if len(hashes) >= num_blocks:
        return hashes
    parent = hashes[-1] if hashes else root_digest(request.cache_salt, request.kv_key)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        digest = blake2b(parent, digest_size=DIGEST_SIZE)
        digest.update(array("q", _known_tokens(request, start, start + block_size)))
        parent = digest.digest()
        hashes.append(parent)
    return hashes


def _known_tokens(request: Request, start: int, end: int) -> list[int]:
    prompt_ids, num_prompt = request.prompt_ids, len(request.prompt_ids)
    if end <= num_prompt:
        return prompt_ids[start:end]
    if start >= num_prompt:
        return request.output_ids[start - num_prompt : end - num_prompt]
    return prompt_ids[start:] + request.output_ids[: end - num_prompt]
