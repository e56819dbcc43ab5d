"""The flags of `chat` and `complete`, with vLLM's names. Knows names, types and ranges: answers nothing."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config.engine_args import HIDDEN, EngineArgs, engine_args, flag
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.options import OptionParser, add_hidden_options, add_model_argument, add_options, with_model

_URL_HELP = "server to ask, for example http://localhost:8000/v1; without it the model runs in this process"
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteArgs:
    """Flags of `complete`: whom to ask, and how to sample.

    Raises:
        InputError: a value out of range, or one that needs --url.
    """

    quick: str | None = flag(None, "one text to continue; without it, every line that is typed")
    url: str | None = flag(None, _URL_HELP)
    model_name: str | None = flag(None, "name of the model on that server; default: the first that it lists")
    api_key: str | None = flag(None, "key for that server; default: the environment's OPENAI_API_KEY")
    temperature: float | None = flag(None, "0 is greedy; default: the server's, or 1")
    top_p: float | None = flag(None, "share of the probability to sample from; default: the server's, or 1")
    max_tokens: int | None = flag(None, "most tokens of an answer; default: the server's, or 16")
    seed: int | None = flag(None, "makes the sampled answers repeatable")

    def __post_init__(self) -> None:
        for name in ("model_name", "api_key"):
            if self.url is None and getattr(self, name) is not None:
                raise InputError(f"{name} belongs to a server: give its --url too, or leave {name} out")
        SamplingParams(**self.sampling())  # raises here, before anything is started

    def sampling(self) -> dict[str, Any]:
        """Gives the sampling parameters that the user set."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatArgs(CompleteArgs):
    """Flags of `chat`."""

    quick: str | None = flag(None, "one question to answer; without it, every line that is typed")
    system_prompt: str | None = flag(None, "what the model is told before the first question")
    max_tokens: int | None = flag(None, "most tokens of an answer; default: as many as the context leaves")


def add_terminal_flags(parser: OptionParser, args: type, title: str) -> None:
    """Adds a command's own flags and all of the engine's but its seed: here a seed is that of the sampling."""
    add_model_argument(parser)
    add_options(parser, args, title)
    add_options(parser, EngineArgs, "EngineConfig", grouped=True, without=("seed",))
    add_hidden_options(parser, HIDDEN)


def split_values[A: CompleteArgs](kind: type[A], values: Mapping[str, Any]) -> tuple[A, EngineArgs | None]:
    """Gives the command's arguments, and the engine's where no server is asked.

    Raises:
        InputError: a value out of range, or flags of an engine beside the address of a server.
    """
    given = with_model(values)
    own = {field.name for field in dataclasses.fields(kind)}
    args = kind(**{name: value for name, value in given.items() if name in own})
    options = {name: value for name, value in given.items() if name not in own}
    if args.url is None:
        return args, engine_args({"max_num_seqs": 1, **options})
    if options:
        name, value = next(iter(options.items()))
        hint = "use --model-name for the model there" if name == "model" else "leave one of the two out"
        raise InputError(f"{name}={value!r} has no effect on the server at url={args.url!r}: {hint}")
    return args, None
