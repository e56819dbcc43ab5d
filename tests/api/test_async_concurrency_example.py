import asyncio
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "async_concurrency.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("async_concurrency", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("num_requests", [1, 40, 1000])
def test_all_requests_run_at_once_and_get_their_tokens(example: Any, scripted: Any, num_requests: int):
    llm, engine = scripted(lambda prompt, index: [65, 66, 67])
    most: list[int] = []
    step = engine.step

    def step_once_all_are_sent() -> Any:
        deadline = time.monotonic() + 20
        while not most and len(llm._listeners) < num_requests and time.monotonic() < deadline:
            time.sleep(0.01)
        most.append(len(engine._living))
        return step()

    engine.step = step_once_all_are_sent
    totals = asyncio.run(asyncio.wait_for(example.run(llm, num_requests, 3), 60))
    assert (totals.num_requests, totals.num_output_tokens) == (num_requests, 3 * num_requests)
    assert max(most) >= num_requests - most[0]
    assert sum(most) == 3 * num_requests
    assert 0 < totals.median_first_token <= totals.longest <= totals.seconds
    assert str(totals).startswith(f"{num_requests} requests, ")


@pytest.mark.slow
def test_the_script_runs_forty_requests_on_smollm2_and_prints_its_totals():
    command = [sys.executable, SCRIPT, "-n", "40", "--max-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    assert re.match(r"40 requests, \d+ prompt tokens and 120 output tokens in \d", done.stdout)
