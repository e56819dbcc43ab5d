"""What README tells a newcomer to type is what the code says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxllm.config.engine_args import DEFAULT_MODEL
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.serve import greeting

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_two_commands_of_a_fresh_machine_stand_first():
    first, second = "pip install uv && uv run python scripts/serve.py\n", "uv run pytest\n"
    assert 0 < README.index(first) < README.index(second) < README.index("## ")


def test_the_curl_line_is_the_one_that_a_server_prints():
    args = ServerArgs()
    llm: Any = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(chat_template="{{ messages }}"))
    printed = greeting(llm, args, args.model_names(DEFAULT_MODEL)[0], args.host, args.port)
    (curl,) = (line.strip() for line in printed.splitlines() if line.strip().startswith("curl"))
    assert curl in README
