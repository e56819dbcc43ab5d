import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client import generate_latest

from jaxllm.api.metrics import RequestBooks, sizes_up_to
from jaxllm.api.outputs import OutputDelta
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.config.server_args import ServerArgs
from jaxllm.engine.messages import EngineStats, RankStats
from jaxllm.server.metrics import make_registry
from jaxllm.server.stats_log import by_rank


def exposed(books: RequestBooks, stats: EngineStats | None = None) -> str:
    return generate_latest(make_registry(lambda: books.read("m", stats or EngineStats()))).decode()


def test_names_and_labels_are_vllms():
    rank = RankStats(running=3, kv_usage=0.5, num_preemptions=6)
    text = exposed(RequestBooks(1000), EngineStats(waiting=4, ranks=(rank,), num_blocks=9, block_size=16))
    for line in (
        'vllm:cache_config_info{block_size="16",engine="0",model_name="m",num_gpu_blocks="9"} 1.0',
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0',
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5',
        'vllm:num_preemptions_total{engine="0",model_name="m"} 6.0',
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 0.0',
        'vllm:generation_tokens_total{engine="0",model_name="m"} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 0.0',
        'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 0.0',
        'vllm:request_prompt_tokens_bucket{engine="0",le="1000.0",model_name="m"} 0.0',
    ):
        assert line in text


def test_the_label_engine_tells_data_ranks_apart_and_the_line_is_told_once():
    ranks = (
        RankStats(1, 0.5, 6, 30, 20, num_step_tokens=70, num_padded_tokens=30),
        RankStats(2, 0.25, 0, 8, 0, num_step_tokens=60, num_padded_tokens=40),
    )
    text = exposed(RequestBooks(1000), EngineStats(running=3, waiting=4, ranks=ranks))
    for name, first, second in (
        ("vllm:num_requests_running", 1.0, 2.0),
        ("vllm:num_requests_waiting", 4.0, 0.0),
        ("vllm:kv_cache_usage_perc", 0.5, 0.25),
        ("vllm:num_preemptions_total", 6.0, 0.0),
        ("vllm:prefix_cache_queries_total", 30.0, 8.0),
        ("vllm:prefix_cache_hits_total", 20.0, 0.0),
        ("jaxllm:step_tokens_total", 70.0, 60.0),
        ("jaxllm:padding_tokens_total", 30.0, 40.0),
    ):
        for rank, value in enumerate((first, second)):
            assert f'{name}{{engine="{rank}",model_name="m"}} {value}' in text
    assert text.count("vllm:e2e_request_latency_seconds_count{") == 1


def test_the_log_line_of_several_data_ranks_ends_with_what_each_does():
    ranks = (RankStats(running=1, kv_usage=0.5, num_step_tokens=70, num_padded_tokens=30), RankStats(running=2))
    assert by_rank(ranks) == "; by data rank: running 1+2, KV use 50.0, 0.0%, padding 30.0, 0.0%"
    assert by_rank(ranks[:1]) == ""


def test_prompt_tokens_are_told_apart_by_where_they_came_from():
    metrics = RequestBooks(100)
    metrics.start(50).take(OutputDelta(token_ids=(1,), num_cached_tokens=48))
    text = exposed(metrics)
    assert 'prompt_tokens_total{engine="0",model_name="m"} 50.0' in text
    assert 'prompt_tokens_cached_total{engine="0",model_name="m"} 48.0' in text
    assert 'prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 48.0' in text
    assert 'prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 2.0' in text


def test_two_servers_in_one_process_keep_their_own_books():
    first, second = (RequestBooks(100) for _ in range(2))
    first.start(7).take(OutputDelta(token_ids=(1, 2)))
    assert 'generation_tokens_total{engine="0",model_name="m"} 2.0' in exposed(first)
    assert 'generation_tokens_total{engine="0",model_name="m"} 0.0' in exposed(second)


def test_a_request_that_never_got_a_token_has_no_prompt_tokens_and_no_latencies():
    metrics = RequestBooks(100)
    meter = metrics.start(7)
    meter.end("abort")
    meter.end("error")
    text = exposed(metrics)
    assert 'prompt_tokens_total{engine="0",model_name="m"} 0.0' in text
    assert 'time_to_first_token_seconds_count{engine="0",model_name="m"} 0.0' in text
    assert 'finished_reason="abort",model_name="m"} 1.0' in text
    assert 'finished_reason="error",model_name="m"} 0.0' in text


def test_latencies_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    metrics = RequestBooks(100)
    meter = metrics.start(7)
    for seconds, delta in (
        (2.0, OutputDelta(token_ids=(1,))),
        (0.5, OutputDelta(token_ids=(2, 3))),
        (0.25, OutputDelta(token_ids=(4,), finish_reason="length")),
    ):
        now[0] += seconds
        meter.take(delta, time_in_queue=0.5)
    text = exposed(metrics)
    for name, total in (
        ("request_queue_time_seconds", 0.5),
        ("request_prefill_time_seconds", 1.5),
        ("request_decode_time_seconds", 0.75),
        ("request_inference_time_seconds", 2.25),
        ("time_to_first_token_seconds", 2.0),
        ("inter_token_latency_seconds", 0.75),
        ("e2e_request_latency_seconds", 2.75),
        ("request_time_per_output_token_seconds", 0.25),
        ("request_generation_tokens", 4.0),
    ):
        assert f'vllm:{name}_sum{{engine="0",model_name="m"}} {total}' in text


def test_length_buckets_are_1_2_5_up_to_the_models_length():
    assert list(sizes_up_to(1024)) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert list(sizes_up_to(1)) == [1]


def test_samples_of_one_request_count_alone_in_their_ends_and_lengths_and_once_in_all_else():
    books = RequestBooks(100)
    meter = books.start(7, SamplingParams(n=2, max_tokens=30))
    meter.take(OutputDelta(index=0, token_ids=(1,)))
    meter.take(OutputDelta(index=1, token_ids=(1, 2), finish_reason="stop"))
    meter.take(OutputDelta(index=0, token_ids=(2,), finish_reason="length"))
    text = exposed(books)
    for name, value in (
        ("prompt_tokens_total", 7),
        ("generation_tokens_total", 4),
        ("time_to_first_token_seconds_count", 1),
        ("e2e_request_latency_seconds_count", 1),
        ("inter_token_latency_seconds_count", 1),
        ("request_generation_tokens_count", 2),
        ("request_params_n_sum", 2),
        ("request_max_num_generation_tokens_sum", 2),
        ("request_prefill_kv_computed_tokens_sum", 7),
        ("request_params_max_tokens_sum", 30),
    ):
        assert f'vllm:{name}{{engine="0",model_name="m"}} {value:.1f}' in text
    for reason in ("stop", "length"):
        assert f'request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}} 1.0' in text


def test_another_prefix_stands_before_vllms_names_and_not_before_our_own():
    registry = make_registry(lambda: RequestBooks(100).read("m", EngineStats()), "our:")
    names = {line.split()[2] for line in generate_latest(registry).decode().splitlines() if line.startswith("# TYPE")}
    assert {"our:num_requests_running", "our:generation_tokens_total", "jaxllm:step_tokens_total"} <= names
    assert not any(name.startswith("vllm:") for name in names)
    with pytest.raises(InputError, match="metrics_prefix='my-'"):
        ServerArgs(metrics_prefix="my-")


def test_every_metric_adds_up_to_what_the_clients_were_given(app: Any):
    """Two prompts of three share 24 tokens (3 blocks of 8), one samples twice, and one client leaves."""
    shared = "s" * 24
    app.runner.step_seconds = 0.005
    bodies = [{"prompt": shared + "abc", "max_tokens": 5}, {"prompt": shared + "xyzw", "max_tokens": 7, "n": 2}]
    usages = [app.post("completions", body).json()["usage"] for body in bodies]
    stopped = app.post("completions", {"prompt": "0123456789", "max_tokens": 20, "stop": "s"}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    usages.append(stopped["usage"])
    left = {"prompt": "9876", "max_tokens": 100, "stream": True}
    with app.client.stream("POST", "/v1/completions", json=left) as response:
        next(response.iter_lines())
    app.wait_for(app.is_empty)
    seen = app.metrics()
    prompt, output = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    at_end = seen["generation_tokens_total"] - output  # of the client that left
    assert 1 <= at_end < 100
    assert output == 5 + 2 * 7 + usages[2]["completion_tokens"]
    assert seen["prompt_tokens_total"] == seen["request_prompt_tokens_sum"] == prompt + 4
    assert seen["prefix_cache_hits_total"] == seen["prompt_tokens_cached_total"] == 24
    assert seen["prefix_cache_queries_total"] >= prompt + 4
    assert seen["request_prefill_kv_computed_tokens_sum"] == prompt + 4 - 24
    reasons = {name: seen[f"request_success_total[{name}]"] for name in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 1, "length": 3, "abort": 1, "error": 0}
    assert seen["request_generation_tokens_sum"] == seen["generation_tokens_total"]
    assert seen["request_generation_tokens_count"] == 5  # samples
    assert seen["inter_token_latency_seconds_count"] == seen["generation_tokens_total"] - 5
    for name in (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
    ):
        assert seen[f"{name}_count"] == 4  # requests
    parts = [seen[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode", "inference")]
    assert parts[1] + parts[2] == pytest.approx(parts[3])
    assert parts[0] + parts[1] == pytest.approx(seen["time_to_first_token_seconds_sum"])
    assert seen["iteration_tokens_total_sum"] == seen["jaxllm:step_tokens_total"]
    assert seen["iteration_tokens_total_count"] == app.llm.stats.num_steps
    assert (seen["num_preemptions_total"], seen["kv_cache_usage_perc"], seen["num_requests_running"]) == (0, 0, 0)


def test_preempted_requests_count_their_tokens_once_and_the_pool_is_told_block_for_block(app: Any):
    pool = app.llm._built.engine.scheduler._kv.pool
    held = pool.lend(88)  # of 128: what is left holds 320 tokens
    body = {"max_tokens": 90, "temperature": 0}
    with ThreadPoolExecutor(8) as pool_of_clients:
        answers = list(pool_of_clients.map(lambda i: app.post("completions", {**body, "prompt": f"{i}bcd"}), range(8)))
    usages = [answer.json()["usage"] for answer in answers]
    app.wait_for(lambda: app.llm.stats.running == 0)
    seen = app.metrics()
    assert [usage["completion_tokens"] for usage in usages] == [90] * 8
    assert seen["num_preemptions_total"] == app.llm.stats.num_preemptions > 0
    assert seen["generation_tokens_total"] == seen["request_generation_tokens_sum"] == 8 * 90
    assert seen["prompt_tokens_total"] == seen["prefix_cache_queries_total"] == 8 * 4
    assert seen["prefix_cache_hits_total"] == seen["prompt_tokens_cached_total"] == 0
    assert seen["time_to_first_token_seconds_count"] == seen["request_success_total[length]"] == 8
    assert seen["inter_token_latency_seconds_count"] == 8 * 89
    assert seen["jaxllm:step_tokens_total"] >= 8 * (4 + 90 - 1) + app.llm.stats.num_recomputed_tokens
    assert app.llm.stats.num_recomputed_tokens > 0
    assert seen["kv_cache_usage_perc"] == pytest.approx(88 / 128)
    pool.give_back(held)
