"""Evaluates a model over a JSONL file of questions with choices, by the log-probability of each choice.

python examples/evaluate_jsonl.py questions.jsonl

A line is {"question": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}. The choice whose tokens
are likeliest, per token, is the model's. Each question's choices share its KV blocks. Without a file a few questions of
this script are used.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from jaxllm import LLM

SAMPLE = (
    {"question": "The capital of France is", "choices": [" Paris", " Rome", " Madrid"], "answer": 0},
    {"question": "Water freezes at a temperature of zero degrees", "choices": [" Celsius", " Napoleon"], "answer": 0},
    {"question": "One, two, three,", "choices": [" seven", " four", " blue"], "answer": 1},
    {"question": "The opposite of hot is", "choices": [" seven", " cold"], "answer": 1},
)


@dataclass(frozen=True, slots=True)
class Question:
    """A beginning, what may follow, and which of these is right."""

    question: str
    choices: list[str]
    answer: int


def read_questions(path: Path | None) -> list[Question]:
    """Reads one question per line; names the line that is none."""
    if path is None:
        return [Question(**line) for line in SAMPLE]  # pyright: ignore[reportArgumentType]
    questions = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            questions.append(Question(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise SystemExit(f"{path}, line {number}: {error}") from None
    return questions


def choose(llm: LLM, questions: list[Question]) -> list[int]:
    """Gives the likeliest choice of each question."""
    pairs = [(each.question, choice) for each in questions for choice in each.choices]
    scores = iter(llm.score([question for question, _ in pairs], [choice for _, choice in pairs]))
    chosen = []
    for each in questions:
        own = [next(scores) for _ in each.choices]
        means = [score.total / len(score.logprobs) for score in own]
        chosen.append(max(range(len(means)), key=means.__getitem__))
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="one question per line; without it, a few of this script")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    questions = read_questions(args.file)
    with LLM(args.model, max_model_len=512) as llm:
        chosen = choose(llm, questions)
    for each, choice in zip(questions, chosen, strict=True):
        print(f"{'right' if choice == each.answer else 'wrong'}: {each.question}{each.choices[choice]}")
    right = sum(choice == each.answer for each, choice in zip(questions, chosen, strict=True))
    print(f"{right} of {len(questions)} right, {right / len(questions):.1%}")


if __name__ == "__main__":
    main()
