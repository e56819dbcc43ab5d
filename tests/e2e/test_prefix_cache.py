"""Sharing KV blocks changes no token: caching on or off, cold or warm, under priorities, windows and a small pool."""

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.scheduler.policy import FCFS

# Windows and several KV groups take twice the time of one group.
FAMILIES = ("llama", pytest.param("gemma3_text", marks=pytest.mark.slow))
ROOMY = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 1024, "block_size": 8}
# Where steps are padded to two shapes, the larger is kept small.
PADDED = ROOMY | {"max_num_batched_tokens": 64, "few_shapes": True}


class NewestFirst(FCFS):
    """A policy of the caller's own."""

    def rank(self, request):
        return 0, -request.order


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def extended(cases: list[dict]) -> dict[str, tuple[list[int], list[int]]]:
    """Prompts that begin alike, and what must follow: each golden case once more with its first tokens as prompt."""
    wanted = {}
    for i, case in enumerate(cases):
        whole = case["prompt_ids"] + case["output_ids"]
        for taken in (0, 1, 5, 16):
            split = len(case["prompt_ids"]) + taken
            wanted[f"{i}-{taken}"] = (whole[:split], whole[split:])
    return wanted


def run(driver, wanted, prefix: str, **options) -> None:
    for rank, (name, (prompt, expected)) in enumerate(wanted.items()):
        driver.tokens[prefix + name] = []
        driver.engine.add(prefix + name, prompt, greedy(len(expected)), **{k: v(rank) for k, v in options.items()})
    driver.run()
    for name, (_, expected) in wanted.items():
        assert driver.tokens[prefix + name] == expected, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [False, True])
def test_tokens_equal_the_goldens_cold_and_warm(family, caching, engine_of, golden_cases):
    wanted = extended(golden_cases(family))
    with engine_of(family, **ROOMY, enable_prefix_caching=caching) as driver:
        run(driver, wanted, "cold-")
        cold = driver.engine.scheduler.stats
        run(driver, wanted, "warm-")
        warm = driver.engine.scheduler.stats
    num_prompt = sum(len(prompt) for prompt, _ in wanted.values())
    if not caching:
        assert (warm.prefix_cache_queries, warm.prefix_cache_hits) == (0, 0)
        return
    assert warm.prefix_cache_queries == 2 * num_prompt
    assert cold.prefix_cache_hits > 0
    assert warm.prefix_cache_hits - cold.prefix_cache_hits > 0.7 * num_prompt
    assert warm.num_scheduled_tokens < 2 * cold.num_scheduled_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_survive_a_pool_of_a_tenth_with_priorities(family, engine_of, golden_cases):
    wanted = extended(golden_cases(family))
    groups = 3 if family == "gemma3_text" else 1
    needed = sum(-(-(len(prompt) + len(rest)) // 8) for prompt, rest in wanted.values())
    small = {"num_gpu_blocks_override": 1 + max(needed // 10, 22) * groups, "scheduling_policy": "priority"}
    with engine_of(family, **PADDED | small, max_model_len=176) as driver:
        run(driver, wanted, "first-", priority=lambda rank: -rank % 3)
        run(driver, wanted, "again-", priority=lambda rank: rank % 4)
        assert driver.engine.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("policy", ["cache-aware", "cache-aware-priority", "own"])
def test_tokens_do_not_depend_on_the_policy(policy, engine_of, golden_cases):
    wanted = extended(golden_cases("llama"))
    given = NewestFirst() if policy == "own" else policy
    with engine_of("llama", **PADDED | {"max_num_seqs": 3}, scheduling_policy=given) as driver:
        run(driver, wanted, "a-", priority=lambda rank: rank % 3)


def test_tenants_of_different_salt_share_nothing_and_get_the_same_tokens(engine_of, golden_cases):
    case = golden_cases("llama")[5]
    wanted = {"only": (case["prompt_ids"], case["output_ids"])}
    with engine_of("llama", **ROOMY) as driver:
        run(driver, wanted, "a-", cache_salt=lambda _: "a")
        run(driver, wanted, "b-", cache_salt=lambda _: "b")
        assert driver.engine.scheduler.stats.prefix_cache_hits == 0
        run(driver, wanted, "a2-", cache_salt=lambda _: "a")
        assert driver.engine.scheduler.stats.prefix_cache_hits > 100


def test_a_reset_forgets_all_prefixes(engine_of, golden_cases):
    case = golden_cases("llama")[5]
    wanted = {"only": (case["prompt_ids"], case["output_ids"])}
    with engine_of("llama", **ROOMY) as driver:
        run(driver, wanted, "1-")
        assert driver.engine.reset_prefix_cache()
        run(driver, wanted, "2-")
        assert driver.engine.scheduler.stats.prefix_cache_hits == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("caching", [False, True])
def test_samples_of_one_prompt_share_its_blocks_and_get_the_tokens_they_get_alone(
    family, caching, engine_of, golden_cases
):
    prompt = golden_cases(family)[5]["prompt_ids"]  # 130 tokens: its last block is not full
    params = SamplingParams(temperature=1.0, seed=40, max_tokens=16, ignore_eos=True)
    names = [f"{i}_many" for i in range(5)]
    with engine_of(family, **ROOMY, enable_prefix_caching=False) as driver:
        for i, name in enumerate(names):
            driver.add(name, prompt, params.replace(seed=40 + i))
            driver.run()
        alone = dict(driver.tokens)
        num_alone = driver.engine.scheduler.stats.num_scheduled_tokens
    with engine_of(family, **ROOMY, enable_prefix_caching=caching) as driver:
        driver.tokens |= {name: [] for name in names}
        driver.engine.add("many", prompt, params.replace(n=5))
        driver.run()
        assert driver.tokens == alone
        stats = driver.engine.scheduler.stats
        assert num_alone - stats.num_scheduled_tokens == stats.num_forked_tokens == 4 * 129
    assert len({tuple(tokens) for tokens in alone.values()}) == 5


def test_a_deadline_ends_a_request_wherever_it_stands(engine_of, golden_cases):
    prompt = golden_cases("llama")[2]["prompt_ids"]
    with engine_of("llama", **ROOMY) as driver:
        for name, deadline in (("past", 0.0), ("none", None)):
            driver.tokens[name] = []
            driver.engine.add(name, prompt, greedy(8), deadline=deadline)
        driver.run()
        assert driver.ends == {"past": "abort", "none": "length"}
        assert "deadline" in driver.errors["past"]
        assert driver.tokens["past"] == []


@pytest.mark.slow
def test_a_shared_prefix_is_computed_once_and_the_second_batch_begins_sooner():
    prefix = [1000 + (37 * i) % 40_000 for i in range(1500)]
    options = {"max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory_bytes": 300 << 20, "enforce_eager": True}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

    def batch(llm, start: int, count: int = 64):
        prompts = [[*prefix, 500 + i, 600 + i] for i in range(start, start + count)]
        before = llm._engine.scheduler.stats.num_scheduled_tokens
        outputs = llm.generate(prompts, params, use_tqdm=False)
        scheduled = llm._engine.scheduler.stats.num_scheduled_tokens - before
        return scheduled, min(output.metrics.time_to_first_token for output in outputs)

    with LLM("smollm2", **options) as llm:
        batch(llm, 1000, 16)  # compiles: every batch has eight rows
        llm.reset_prefix_cache()
        first, first_ttft = batch(llm, 0)
        second, second_ttft = batch(llm, 64)
    own = 64 * (1502 - 93 * 16 + 2)  # behind the 93 full blocks: the rest of the prompt, and two outputs fed back
    assert first == 93 * 16 + own
    assert second == own
    print(f"first {first} tokens, {first_ttft:.2f} s; second {second} tokens, {second_ttft:.2f} s to the first token")
    assert second_ttft < first_ttft / 2
