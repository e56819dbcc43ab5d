"""A JSON file of `jaxllm bench` -> evidence. Knows its names; judges nothing.

Of requests that were sent at once, or came one after another, as many are unfinished in the mean as their times from
sending to end add up to in a second of the run (Little's law); those in no step wait.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config.errors import InputError
from jaxllm.diagnose.evidence import Evidence

_ROWS = re.compile(r"--max[-_]num[-_]seqs[ =](\d+)")
_COPIES = re.compile(r"(?:--data[-_]parallel[-_]size|-dp)[ =](\d+)")
_DEVICE = re.compile(r"\d+ x (?:NVIDIA )?(\S+)")
_USUAL_ROWS, _USUAL_ROWS_CPU = 256, 32


def read_bench(file: str) -> list[Evidence]:
    """Reads what `jaxllm bench throughput`, `latency` or `suite` wrote, all that jaxllm's engine ran.

    Raises:
        InputError: the file cannot be read or is of another kind.
    """
    try:
        content = json.loads(Path(file).expanduser().read_text())
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{file} is no JSON: {error}") from None
    entries = _entries(content)
    found = [evidence_of(content, row, result) for row, result in entries if result.get("steps")]
    if not found:
        raise InputError(
            f"{file} has no figures of jaxllm's steps: name a file of `jaxllm bench throughput --output-json`"
        )
    return found


def evidence_of(facts: Mapping[str, Any], row: Mapping[str, Any], result: Mapping[str, Any]) -> Evidence:
    """Draws the evidence from one measurement.

    Raises:
        InputError: a figure is missing.
    """
    device = str(facts.get("device", ""))
    is_cpu = "(cpu)" in device
    command = str(facts.get("command", ""))
    given, copied = _ROWS.search(command), _COPIES.search(command)
    copies = int(copied[1]) if copied else 1
    rows = row.get("max_num_seqs") or (int(given[1]) if given else _USUAL_ROWS_CPU if is_cpu else _USUAL_ROWS)
    named = _DEVICE.match(device)
    try:
        steps, seconds, latencies = result["steps"], float(result["elapsed_time"]), result["latencies_ms"]
        num_requests = int(result["num_requests"])
        busy = min(1.0, steps["num_steps"] * (steps["host_ms"] + steps["wait_ms"]) / 1e3 / seconds)
        unfinished = num_requests * latencies["e2e"]["mean"] / 1e3 / seconds
        return Evidence(
            name=str(result.get("workload", "")),
            seconds=seconds,
            num_requests=num_requests,
            num_prompt_tokens=int(result["num_prompt_tokens"]),
            num_output_tokens=int(result["num_output_tokens"]),
            running=steps["mean_batch"] / copies,
            waiting=max(0.0, unfinished - steps["mean_batch"] * busy) / copies,
            copies=copies,
            rows=int(rows),
            busy=busy,
            kv_peak=float(steps["kv_usage_peak"]),
            num_preemptions=int(steps["num_preemptions"]),
            num_recomputed_tokens=int(steps["num_recomputed_tokens"]),
            host_ms=float(steps["host_ms"]),
            wait_ms=float(steps["wait_ms"]),
            tpot_ms=_p50(latencies.get("tpot")),
            ttft_ms=_p50(latencies.get("ttft")),
            is_cpu=is_cpu,
            model=row.get("model") or facts.get("model"),
            device=named[1] if named else None,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{result.get('workload', 'a result')}: {error!r} where a figure should be") from None


def _entries(content: Any) -> Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    if not isinstance(content, dict):
        return []
    rows = [row for row in content.get("rows", []) if isinstance(row, dict) and isinstance(row.get("result"), dict)]
    results = [result for result in content.get("results", []) if isinstance(result, dict)]
    return [(row, row["result"]) for row in rows] + [({}, result) for result in results]


def _p50(spread: Mapping[str, float] | None) -> float | None:
    return None if spread is None else float(spread["p50"])
