"""`jaxllm bench serve` and the server count the same: what one sends and reads, the other's metrics have."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli import main


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_clients_tokens_and_times_are_those_of_the_servers_metrics(shared_app: Any, tmp_path: Path, backend: str):
    shared_app.runner.step_seconds = 0.002
    before = shared_app.metrics()
    flags = ["--base-url", shared_app.url, "--backend", backend, "--num-prompts", "20", "--random-input-len", "9"]
    flags += ["--random-output-len", "12", "--vocab-size", "128", "--request-rate", "100", "--seed", "3"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *flags, "--output-json", str(tmp_path / "run.json")])
    assert ended.value.code == 0
    shared_app.wait_for(shared_app.is_empty)
    after, said = shared_app.metrics(), json.loads((tmp_path / "run.json").read_text())
    gained = {name: value - before[name] for name, value in after.items()}
    assert said["completed"] == gained["request_success_total[length]"] == 20
    assert said["total_output_tokens"] == gained["generation_tokens_total"] == 20 * 12
    assert said["total_input_tokens"] == gained["prompt_tokens_total"]
    if backend == "openai":
        assert said["total_input_tokens"] == 20 * 9
    for kind, name in (("ttft", "time_to_first_token_seconds"), ("e2el", "e2e_request_latency_seconds")):
        mean = 1e3 * gained[f"{name}_sum"] / gained[f"{name}_count"]
        assert mean < said[f"mean_{kind}_ms"] < mean + 2000
