"""Runs many short requests at once through AsyncLLM and prints totals: python examples/async_concurrency.py -n 1000.

Each request is a task of its own, as in a web service: all are sent at once, and the engine batches at every step.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass

from jaxllm import AsyncLLM, SamplingParams

NOUNS = ("cat", "river", "king", "robot", "ship", "teacher", "forest", "moon", "book", "garden")
OPENINGS = ("Once upon a time, a", "The best thing about a", "Nobody expected the", "In the morning, the")


@dataclass(frozen=True, slots=True)
class Totals:
    """What all requests took together; times in seconds."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    median_first_token: float
    longest: float

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests, {self.num_prompt_tokens} prompt tokens and {self.num_output_tokens} output "
            f"tokens in {self.seconds:.1f} s: {self.num_requests / self.seconds:.1f} requests/s, "
            f"{self.num_output_tokens / self.seconds:.1f} output tokens/s\n"
            f"first token after {self.median_first_token:.2f} s (median), longest request {self.longest:.2f} s"
        )


async def answer(llm: AsyncLLM, index: int, max_tokens: int) -> tuple[int, int, float, float]:
    """Follows one request; gives its prompt and output tokens, and seconds to its first token and to its end."""
    prompt = f"{OPENINGS[index % len(OPENINGS)]} {NOUNS[index // len(OPENINGS) % len(NOUNS)]}"
    params = SamplingParams(temperature=0.8, seed=index, max_tokens=max_tokens)
    start = time.perf_counter()
    first, num_output_tokens = 0.0, 0
    async for delta in llm.stream(prompt, params, request_id=f"request-{index}"):
        first = first or time.perf_counter() - start
        num_output_tokens += len(delta.token_ids)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    return len(tokenizer.encode(prompt)), num_output_tokens, first, time.perf_counter() - start


async def run(llm: AsyncLLM, num_requests: int, max_tokens: int) -> Totals:
    """Runs all requests at once."""
    start = time.perf_counter()
    results = await asyncio.gather(*(answer(llm, index, max_tokens) for index in range(num_requests)))
    seconds = time.perf_counter() - start
    prompts, outputs, firsts, ends = zip(*results, strict=True)
    return Totals(num_requests, sum(prompts), sum(outputs), seconds, sorted(firsts)[num_requests // 2], max(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--num-requests", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=8, help="output tokens of each request")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    if args.num_requests < 1:
        parser.error("--num-requests must be at least 1")
    llm = AsyncLLM(args.model, max_model_len=128)
    try:
        print(asyncio.run(run(llm, args.num_requests, args.max_tokens)))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main()
