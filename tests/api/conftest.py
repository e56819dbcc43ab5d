"""An engine that answers by script, for tests of what stands above it: tokens, scores and ends are as the test says."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.api.start import Started
from jaxllm.config.errors import InputError
from jaxllm.engine.engine import StepTimes
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.messages import sample_ids
from jaxllm.engine.scores import RequestScores, TokenScores
from jaxllm.scheduler.request import RequestUpdate
from jaxllm.text.tokenizer import Tokenizer

VOCABULARY = 256
EOS = 0


def score_of(token: int, place: int) -> float:
    """The log-probability that the scripted model gives a token at a place; lower ids are better."""
    return -(token + 1) / 100 - place / 1000


def scores_at(token: int, place: int, num_top: int, named: list[int]) -> TokenScores:
    best = range(VOCABULARY if num_top < 0 else num_top)
    ids = (token, *best, *named)
    ranks = (token + 1, *(other + 1 for other in best), *(0 for _ in named))
    return TokenScores(ids, tuple(score_of(other, place) for other in ids), ranks)


class ScriptedEngine:
    """Gives sample i of a request the tokens of `script(prompt, i)`, one a step; an abort takes effect at once."""

    def __init__(self, script: Callable[[list[int], int], list[int]]):
        self.limits = EngineLimits(vocab_size=VOCABULARY, max_model_len=1000, eos_token_ids=(EOS,), max_logprobs=-1)
        self.times = StepTimes()
        self.hanging = None
        self.is_paused = False
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.failure: str | None = None
        self._script = script
        self._living: dict[str, dict[str, Any]] = {}

    @property
    def scheduler(self) -> Any:
        zero = ("num_preemptions", "num_scheduled_tokens", "num_recomputed_tokens", "num_discarded_tokens")
        more = ("prefix_cache_queries", "prefix_cache_hits", "waiting")
        stats = dict.fromkeys((*zero, *more), 0) | {"running": len(self._living), "kv_usage": len(self._living) / 100}
        told = SimpleNamespace(**stats)
        return SimpleNamespace(stats=told, rank_stats=[told])

    @property
    def has_work(self) -> bool:
        return bool(self._living) and not self.is_paused

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, *_: object) -> None:
        self.limits.check(prompt_ids, params)
        for index, name in enumerate(sample_ids(request_id, params.n)):
            tokens = self._script(prompt_ids, index)[: params.max_tokens]
            self._living[name] = {"prompt": prompt_ids, "tokens": tokens, "params": params, "done": 0}

    def abort(self, request_id: str) -> RequestUpdate | None:
        self.aborted.append(request_id)
        return RequestUpdate(request_id, finish_reason="abort") if self._living.pop(request_id, None) else None

    def step(self) -> list[RequestUpdate]:
        if self.failure is not None:
            error, self.failure = self.failure, None
            failed, self._living = list(self._living), {}
            return [RequestUpdate(name, finish_reason="error", error=error) for name in failed]
        self.times.num_steps += 1
        return [self._advance(name) for name in list(self._living)]

    def _advance(self, name: str) -> RequestUpdate:
        request = self._living[name]
        params, place = request["params"], request["done"]
        token = request["tokens"][place]
        request["done"] += 1
        is_scored = params.logprobs is not None or params.logprob_token_ids
        scores = ()
        if is_scored:
            scores = (scores_at(token, place, params.logprobs or 0, params.logprob_token_ids or []),)
        prompt = None
        if params.prompt_logprobs is not None and place == 0:
            rest = enumerate(request["prompt"][1:], 1)
            prompt = (None, *(scores_at(token, place, params.prompt_logprobs, []) for place, token in rest))
        reason, stop = None, None
        if token == EOS and not params.ignore_eos:
            reason = "stop"
        elif token in params.stop_token_ids:
            reason, stop = "stop", token
        elif request["done"] == len(request["tokens"]):
            reason = "length"
        if reason is not None:
            del self._living[name]
        carried = RequestScores(scores, prompt) if is_scored or prompt is not None else None
        return RequestUpdate(
            name, (token,), reason, stop, num_cached_tokens=3, scores=carried, first_scheduled_time=time.monotonic()
        )

    def pause(self, mode: str) -> list[RequestUpdate]:
        self.calls.append(f"pause {mode}")
        self.is_paused = True
        return []

    def resume(self) -> None:
        self.calls.append("resume")
        self.is_paused = False

    def reset_prefix_cache(self) -> bool:
        return not self._living

    def start_profile(self, directory: str) -> None:
        if directory == "taken":
            raise InputError("a profile is being taken already: stop it first")
        raise OSError("disk full")

    def stop_profile(self) -> None:
        self.calls.append("stop_profile")

    def close(self) -> None:
        self.calls.append("close")


def byte_tokenizer() -> Tokenizer:
    """One token per byte, of the byte's own number; 0 ends a text and is special."""
    alphabet = dict(zip(sorted(range(256)), _chars_by_byte(), strict=True))
    backend = tokenizers.Tokenizer(models.BPE({char: byte for byte, char in alphabet.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([alphabet[EOS]])
    template = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    return Tokenizer(backend, chat_template=template + "{{ suffix }}", eos_token_ids=[EOS])


def _chars_by_byte() -> list[str]:
    """GPT-2's characters for the bytes 0 to 255."""
    from jaxllm.text.token_stream import _BYTE_OF_CHAR

    return [char for char, _ in sorted(_BYTE_OF_CHAR.items(), key=lambda item: item[1])]


def started(engine: ScriptedEngine, tokenizer: Tokenizer | None) -> Started:
    built = SimpleNamespace(sampling_defaults={}, engine=engine, report=list, close=engine.close, processes=None)
    return Started(cast(Any, built), tokenizer, "scripted")


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def scripted(bytes_tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[AsyncLLM, ScriptedEngine]]]:
    """Makes AsyncLLM over a scripted engine, which ends with the test."""
    made: list[AsyncLLM] = []

    def make(script: Callable[[list[int], int], list[int]]) -> tuple[AsyncLLM, ScriptedEngine]:
        engine = ScriptedEngine(script)
        made.append(AsyncLLM.from_started(started(engine, bytes_tokenizer)))
        return made[-1], engine

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture
def scripted_llm(bytes_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes LLM over a scripted engine."""
    from jaxllm.api import llm as module

    def make(script: Callable[[list[int], int], list[int]], tokenizer: Tokenizer | None = bytes_tokenizer) -> Any:
        engine = ScriptedEngine(script)
        monkeypatch.setattr(module, "start", lambda *_, **__: started(engine, tokenizer))
        llm = module.LLM("smollm2")
        return llm, engine

    return make
