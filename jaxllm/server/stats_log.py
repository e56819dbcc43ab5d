"""The periodic log line of a busy server. Knows counters and gauges; no requests."""

import asyncio
import logging
import time
from collections.abc import Sequence

from jaxllm.api.engine_client import EngineClient
from jaxllm.engine.messages import EngineStats, RankStats

logger = logging.getLogger(__name__)


async def log_stats(llm: EngineClient, every: float) -> None:
    """Logs what the engine does until cancelled; says nothing while nothing happens."""
    books = llm.books
    then, prompt, generation = time.monotonic(), books.num_prompt_tokens, books.num_generation_tokens
    before = llm.stats
    while True:
        await asyncio.sleep(every)
        now, stats = time.monotonic(), llm.stats
        new_prompt, new_generation = books.num_prompt_tokens - prompt, books.num_generation_tokens - generation
        if stats.running or stats.waiting or new_prompt or new_generation:
            logger.info(
                "running %d, waiting %d, KV use %.1f%%, prompt %.1f tok/s, generation %.1f tok/s%s%s",
                stats.running,
                stats.waiting,
                100 * stats.kv_usage,
                new_prompt / (now - then),
                new_generation / (now - then),
                hit_rate(before, stats),
                by_rank(stats.ranks),
            )
        before = stats
        then, prompt, generation = now, prompt + new_prompt, generation + new_generation


def hit_rate(before: EngineStats, after: EngineStats) -> str:
    """Says which share of the prompt tokens looked up meanwhile was in the prefix cache; nothing where none was."""
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    return f", prefix cache hits {100 * hits / queries:.1f}%" if queries > 0 else ""


def by_rank(ranks: Sequence[RankStats]) -> str:
    """Says what each of several data ranks does; nothing where there is one. Padding is counted since the start."""
    if len(ranks) == 1:
        return ""
    running = "+".join([str(rank.running) for rank in ranks])
    kv_usage = ", ".join([f"{100 * rank.kv_usage:.1f}" for rank in ranks])
    padding = ", ".join([f"{100 * rank.padding_share:.1f}" for rank in ranks])
    return f"; by data rank: running {running}, KV use {kv_usage}%, padding {padding}%"
