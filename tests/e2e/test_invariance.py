"""The same tokens whatever the batch, the chunking, the block size, preemption, arrivals and neighbours."""

import random

import pytest

from jaxllm import SamplingParams

# Windows and several KV groups take twice the time of one group.
FAMILIES = ("llama", pytest.param("gemma3_text", marks=pytest.mark.slow))
# Engines whose number of rows, blocks and tokens in a block are the same share their programs.
ROOMY = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 1024}
# Where steps are padded to two shapes, the larger is kept small.
PADDED = ROOMY | {"max_num_batched_tokens": 64, "few_shapes": True}


def requests(cases: list[dict], count: int, seed: int = 0) -> dict[str, tuple[list[int], SamplingParams]]:
    """A mix of lengths, greedy and sampled, with 64-bit seeds and every sampling field."""
    rng = random.Random(seed)
    mixed = {}
    for i in range(count):
        prompt = [rng.randrange(3, 300) for _ in range(rng.randint(1, 70))]
        if i < len(cases):
            prompt = cases[i]["prompt_ids"]
        max_tokens = rng.randint(8, 40)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        if i % 3:
            params = params.replace(
                temperature=rng.choice([0.5, 1.0, 1.7]),
                top_k=rng.choice([0, 5, 40]),
                top_p=rng.choice([1.0, 0.8]),
                min_p=rng.choice([0.0, 0.05]),
                seed=rng.getrandbits(64),
            )
        if i % 4 == 1:  # the token before the last one is on the device only: these depend on it all the same
            params = params.replace(
                repetition_penalty=rng.choice([1.0, 1.3]),
                frequency_penalty=rng.choice([0.0, 0.5]),
                presence_penalty=0.5,
                logit_bias={rng.randrange(300): 3.0},
                bad_word_token_ids=tuple((rng.randrange(300), rng.randrange(300)) for _ in range(40)),
                allowed_token_ids=list(range(40, 300)) if i % 8 == 1 else None,
            )
        mixed[f"r{i}"] = (prompt, params)
    return mixed


def run_together(driver, mixed) -> dict[str, list[int]]:
    for name, (prompt, params) in mixed.items():
        driver.add(name, prompt, params)
    driver.run()
    assert all(driver.ends[name] == "length" for name in mixed)
    return {name: driver.tokens[name] for name in mixed}


@pytest.fixture(scope="module", params=FAMILIES)
def truth(request, engine_of, golden_cases):
    """32 mixed requests, and the tokens of each when it runs alone."""
    mixed = requests(golden_cases(request.param), 32)
    tokens = {}
    with engine_of(request.param, **ROOMY) as driver:
        for name, one in mixed.items():
            tokens |= run_together(driver, {name: one})
    return request.param, mixed, tokens


@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 2048])
def test_tokens_do_not_depend_on_the_batch_nor_on_chunking(truth, engine_of, max_num_batched_tokens):
    family, mixed, alone = truth
    with engine_of(family, **ROOMY | {"max_num_batched_tokens": max_num_batched_tokens}) as driver:
        assert run_together(driver, mixed) == alone


@pytest.mark.parametrize("block_size", [8, 32])
def test_tokens_do_not_depend_on_the_block_size(truth, engine_of, block_size):
    family, mixed, alone = truth
    with engine_of(family, **PADDED, block_size=block_size) as driver:
        assert run_together(driver, mixed) == alone


def test_tokens_survive_a_pool_so_small_that_requests_are_preempted_many_times(truth, engine_of):
    family, mixed, alone = truth
    groups = 3 if family == "gemma3_text" else 1
    small = PADDED | {"num_gpu_blocks_override": 1 + 22 * groups, "max_model_len": 176, "block_size": 8}
    with engine_of(family, **small) as driver:
        assert run_together(driver, mixed) == alone
        stats = driver.engine.scheduler.stats
        assert stats.num_preemptions >= (10 if groups == 1 else 3)  # windows given back leave more room
        assert stats.num_recomputed_tokens > 0


def test_tokens_do_not_depend_on_arrivals_nor_on_aborted_neighbours(truth, engine_of):
    family, mixed, alone = truth
    rng = random.Random(1)
    waiting = list(mixed.items())
    with engine_of(family, **ROOMY) as driver:
        for name, (prompt, params) in mixed.items():
            driver.tokens[name] = []
            waiting.append((f"doomed-{name}", (prompt, params)))
        rng.shuffle(waiting)
        doomed: list[str] = []
        while waiting or driver.engine.has_work:
            for _ in range(min(rng.randint(0, 3), len(waiting))):
                name, (prompt, params) = waiting.pop()
                driver.add(name, prompt, params)
                if name.startswith("doomed-"):
                    doomed.append(name)
            if doomed and rng.random() < 0.4:
                driver.abort(doomed.pop(rng.randrange(len(doomed))))
            driver.step()
        assert driver.engine.scheduler.stats.kv_usage == 0.0
        assert {name: driver.tokens[name] for name in mixed} == alone
        assert any(end == "abort" for end in driver.ends.values())


def test_a_request_without_a_seed_keeps_the_one_it_drew(engine_of, golden_cases):
    prompt = golden_cases("llama")[2]["prompt_ids"]
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    runs = []
    for blocks in (64, 8):  # the second preempts
        options = {"max_num_seqs": 4, "max_model_len": 64, "num_gpu_blocks_override": blocks, "few_shapes": True}
        with engine_of("llama", **options, seed=5) as driver:
            for name in "abcd":
                driver.add(name, prompt, params)
            driver.run()
            runs.append(dict(driver.tokens))
            preempted = driver.engine.scheduler.stats.num_preemptions
    assert runs[0] == runs[1]
    assert preempted > 0
    assert len({tuple(tokens) for tokens in runs[0].values()}) == 4
