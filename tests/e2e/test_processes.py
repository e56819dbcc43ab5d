"""One engine over several real processes gives the tokens of one device, and ends as a whole."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams

PROGRAM = """
import json, sys
from jaxllm import LLM, SamplingParams
from jaxllm.api.follower import run_follower

options, prompts, params, goes_on = (json.loads(argument) for argument in sys.argv[1:])
if options["node_rank"]:
    run_follower(**options)
    print("the engine was closed")
    sys.exit()
with LLM(**options) as llm:
    params = [SamplingParams(**each) for each in params]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for output in outputs:
        told = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())]
        scores = [{token: score.logprob for token, score in (each or {}).items()} for each in told]
        print(json.dumps([[list(each.token_ids) for each in output.outputs], scores]))
    print("done", flush=True)
    while goes_on:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
"""
ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
}
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 7, "logprobs": 3, "max_tokens": 8, "ignore_eos": True}
# A scored prompt, counted tokens, and two samples that share blocks, of which the last is copied.
RARE = (
    {"temperature": 0.0, "prompt_logprobs": 2, "max_tokens": 4, "ignore_eos": True},
    {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 3, "max_tokens": 8, "ignore_eos": True},
    {"temperature": 0.8, "n": 2, "seed": 4, "max_tokens": 8, "ignore_eos": True},
)


def free_port() -> int:
    """A port that is free, as the next one is."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@contextmanager
def processes(
    request: pytest.FixtureRequest, count: int, prompts: Sequence, params: Sequence, goes_on: bool = False, **options
) -> Iterator[list[subprocess.Popen]]:
    """Starts an engine's processes, each with one device, and leaves none behind."""
    assert request.config.cache is not None
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(request.config.cache.mkdir("xla")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    started, port = [], free_port()
    deadline = threading.Timer(300, lambda: [process.kill() for process in started])  # a hang is a failure
    deadline.start()
    try:
        for rank in range(count):
            own = {**ENGINE, **options, "nnodes": count, "node_rank": rank, "master_addr": "127.0.0.1"}
            arguments = [own | {"master_port": port}, prompts, params, goes_on]
            command = [sys.executable, "-c", PROGRAM, *map(json.dumps, arguments)]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
        yield started
    finally:
        deadline.cancel()
        for process in started:
            process.kill()
            process.communicate()


def answers(process: subprocess.Popen) -> list:
    """Reads what process 0 says until it is done."""
    lines = []
    for line in process.stdout or ():
        if line == "done\n":
            return lines
        if line.startswith("["):
            lines += [json.loads(line)] if line.startswith("[[") else []  # gloo speaks too
    raise AssertionError((process.communicate()[1] or "")[-4000:])


def of_one_device(folder, prompts: Sequence, params: Sequence) -> list:
    with LLM(str(folder), **ENGINE) as llm:
        asked = [SamplingParams(**each) for each in params]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    return [
        [
            [list(each.token_ids) for each in output.outputs],
            [
                {str(token): score.logprob for token, score in (each or {}).items()}
                for each in [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())]
            ],
        ]
        for output in outputs
    ]


def check_same(found: list, expected: list) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, scores), (_, expected_scores) in zip(found, expected, strict=True):
        for position, expected_position in zip(scores, expected_scores, strict=True):
            assert position.keys() == expected_position.keys()
            np.testing.assert_allclose([*position.values()], [*expected_position.values()], atol=1e-4, rtol=0)


def check_lost(left: subprocess.Popen, lost: subprocess.Popen, line: str) -> None:
    """The process that is left says which is gone, and nothing else, and ends."""
    began = time.monotonic()
    lost.send_signal(signal.SIGKILL)
    _, errors = left.communicate(timeout=30)
    assert time.monotonic() - began < 30
    assert left.returncode == 1
    assert [each for each in errors.splitlines() if each.startswith("jaxllm:")] == [line], errors[-4000:]
    assert "Traceback" not in errors, errors[-4000:]
    assert "Check failure" not in errors, errors[-4000:]


def golden_work(folder) -> tuple[list, list, list]:
    """Prompts with their parameters, and the tokens of those that are greedy."""
    cases = json.loads((folder / "golden.json").read_text())["cases"][:3]
    greedy = [{"temperature": 0.0, "max_tokens": len(case["output_ids"]), "ignore_eos": True} for case in cases[:2]]
    prompts = [case["prompt_ids"] for case in cases]
    return prompts, [*greedy, SAMPLED], [case["output_ids"] for case in cases[:2]]


def test_two_processes_share_a_model_and_a_killed_one_ends_the_other(golden, request):
    folder = golden / "llama"
    prompts, params, expected = golden_work(folder)
    with processes(request, 2, prompts, params, True, model=str(folder), tensor_parallel_size=2) as (leader, follower):
        found = answers(leader)
        assert [tokens for tokens, _ in found[:2]] == [[each] for each in expected]
        check_same(found, of_one_device(folder, prompts, params))
        gone = f"jaxllm: process 1 of 2 (host {socket.gethostname()}) is gone: its connection closed"
        check_lost(leader, follower, f"{gone}; the other processes end too")


@pytest.mark.slow
def test_two_processes_with_requests_of_their_own_end_with_the_first(golden, request):
    folder = golden / "llama"
    prompts, params, _ = golden_work(folder)
    prompts, params = [*prompts, *prompts], [*params, *RARE]
    with processes(request, 2, prompts, params, True, model=str(folder), data_parallel_size=2) as (leader, follower):
        check_same(answers(leader), of_one_device(folder, prompts, params))
        gone = f"jaxllm: process 0 of 2 (host {socket.gethostname()}) is gone: its connection closed"
        check_lost(follower, leader, f"{gone}; the other processes end too")


@pytest.mark.slow
def test_four_processes_make_two_ranks_of_two_and_end_in_order(golden, request):
    folder = golden / "llama"
    prompts, params, _ = golden_work(folder)
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    with processes(request, 4, prompts, params, model=str(folder), **sizes) as started:
        check_same(answers(started[0]), of_one_device(folder, prompts, params))
        for process in started:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors[-4000:]
            assert "the engine was closed" in output or process is started[0]
