"""Measures workloads on the engine in this process: `jaxllm bench throughput` with two shorter spellings.

python scripts/bench.py --workloads L1,L8 --model llama-3.1-8b --load-format dummy --max-model-len 4096
"""

import sys

from jaxllm.cli import main

SPELLINGS = {"--workloads": "--workload", "--limit": "--num-prompts"}
DEFAULT = ["--workload", "L1,L8"]
CHOOSING = ("--workload", "--config", "--input-len", "--output-len", "--num-prompts")


def arguments(given: list[str]) -> list[str]:
    """Gives what `jaxllm` is called with."""
    spelled = []
    for argument in given:
        name, equals, value = argument.partition("=")
        spelled.append(SPELLINGS.get(name, name) + equals + value)
    chosen = any(argument.partition("=")[0] in CHOOSING for argument in spelled)
    return ["bench", "throughput", *([] if chosen else DEFAULT), *spelled]


if __name__ == "__main__":
    main(arguments(sys.argv[1:]))
