from jaxllm.engine.messages import EngineStats
from jaxllm.server.stats_log import hit_rate


def test_the_hit_rate_is_that_of_the_time_between_two_lines():
    before = EngineStats(prefix_cache_queries=100, prefix_cache_hits=100)
    after = EngineStats(prefix_cache_queries=300, prefix_cache_hits=150)
    assert hit_rate(before, after) == ", prefix cache hits 25.0%"
    assert hit_rate(after, after) == ""
    assert hit_rate(after, EngineStats()) == ""  # the engine was started again
