"""Many prompts with a shared beginning: the engine computes it once, and every other prompt finds its KV blocks.

python examples/shared_prefix.py --questions 16
"""

import argparse
import time

from jaxllm import LLM, RequestOutput, SamplingParams

NOTES = (
    "Notes of the harbour master. The Alba carries apples, the Brisa carries bricks, the Corvo carries coal. "
    "Ships that carry food are unloaded first, then those with coal, then all others. "
) * 6
SHIPS = ("Alba", "Brisa", "Corvo")


def ask(llm: LLM, num_questions: int, max_tokens: int = 8) -> list[RequestOutput]:
    """Asks about a ship behind the same notes, again and again."""
    prompts = [f"{NOTES}\nQuestion {i}: what does the {SHIPS[i % 3]} carry?\nAnswer:" for i in range(num_questions)]
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, stop="\n"), use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=16)
    args = parser.parse_args()
    for caching in (False, True):
        with LLM(args.model, max_model_len=1024, enable_prefix_caching=caching) as llm:
            ask(llm, args.questions, max_tokens=1)  # compiles what is needed
            llm.reset_prefix_cache()
            start = time.perf_counter()
            results = ask(llm, args.questions)
            seconds = time.perf_counter() - start
        total = sum(len(result.prompt_token_ids) for result in results)
        found = sum(result.num_cached_tokens for result in results)
        print(f"prefix caching {'on' if caching else 'off'}: {found} of {total} prompt tokens found, {seconds:.1f} s")
    for result in results[:3]:
        print(result.outputs[0].text.strip())


if __name__ == "__main__":
    main()
