"""`--engine both`: each engine in a process of its own, so that either has the whole device; then the ratio.

Knows the command line of `bench` and the JSON that it writes; measures nothing itself.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.bench.args import LatencyArgs, ThroughputArgs
from jaxllm.bench.figures import agreement
from jaxllm.bench.hf_model import CHECKPOINT_WEIGHTS, check_torch
from jaxllm.bench.report import print_table, tell, write_json

_DETAIL = ("outputs", "token_times")


def compare(command: str, values: Mapping[str, Any], args: ThroughputArgs | LatencyArgs) -> int:
    """Runs the command once for each engine and prints how their output speeds compare; gives the exit code.

    Raises:
        InputError: torch is not installed.
    """
    check_torch()
    reports: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder:
        for engine in ("hf", "jaxllm"):
            tell(f"measuring {engine}")
            place, flags = Path(folder) / f"{engine}.json", Path(folder) / f"{engine}.flags"
            plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
            flags.write_text(json.dumps(plain | {"engine": engine, "output_json": str(place), "save_detailed": True}))
            done = subprocess.run(
                [sys.executable, "-m", "jaxllm", *command.split(), "--config", str(flags)], check=False
            )
            if done.returncode != 0:
                return done.returncode
            reports[engine] = json.loads(place.read_text())
    ratios = _ratios(reports)
    print()
    print_table(
        ["workload", "compared with", "out tok/s", "jaxllm", "ratio", "same tokens", "agreeing"],
        [
            [
                r["workload"],
                r["engine"],
                f"{r['output_tokens_per_second']:,.1f}",
                f"{r['own_output_tokens_per_second']:,.1f}",
                f"{r['ratio']:.2f}",
                "other weights" if r["agreement"] is None else f"{r['num_same']} of {r['num_requests']}",
                "" if r["agreement"] is None else f"{r['agreement']:.1%}",
            ]
            for r in ratios
        ],
    )
    if not args.save_detailed:
        for report in reports.values():
            report["results"] = [{k: v for k, v in r.items() if k not in _DETAIL} for r in report["results"]]
    write_json(args.output_json, {"ratios": ratios, **reports})
    return 0


def _ratios(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each workload and way of transformers; `agreement` is the share of tokens before they differ.

    It is None where either side has random weights of its own.
    """
    has_same_weights = reports["hf"]["weights"] == CHECKPOINT_WEIGHTS
    own = {result["workload"]: result for result in reports["jaxllm"]["results"]}
    ratios = []
    for result in reports["hf"]["results"]:
        mine = own[result["workload"]]
        num_same, share = agreement(mine["outputs"], result["outputs"]) if has_same_weights else (None, None)
        ratios.append(
            {
                "workload": result["workload"],
                "engine": result["engine"],
                "output_tokens_per_second": result["output_tokens_per_second"],
                "own_output_tokens_per_second": mine["output_tokens_per_second"],
                "ratio": mine["output_tokens_per_second"] / result["output_tokens_per_second"],
                "num_same": num_same,
                "num_requests": mine["num_requests"],
                "agreement": share,
            }
        )
    return ratios
