"""Choices are weighed by their log-probability per token; a line that is no question is named."""

import json

import pytest


def test_a_file_is_read_line_by_line(example, tmp_path):
    script = example("evaluate_jsonl")
    path = tmp_path / "questions.jsonl"
    line = {"question": "A", "choices": ["b", "c"], "answer": 1}
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"question": "B"}) + "\n")
    assert [each.question for each in script.read_questions(path)] == ["A", "B"]
    path.write_text(json.dumps(line) + '\n{"question": "B"}\n')
    with pytest.raises(SystemExit, match="line 2"):
        script.read_questions(path)
    path.write_text("not json\n")
    with pytest.raises(SystemExit, match="line 1"):
        script.read_questions(path)


def test_the_model_knows_most_of_the_sample(example, smollm2):
    script = example("evaluate_jsonl")
    questions = script.read_questions(None)
    chosen = script.choose(smollm2, questions)
    assert sum(choice == each.answer for each, choice in zip(questions, chosen, strict=True)) >= 3
