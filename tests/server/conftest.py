"""A real engine over a scripted model, behind a real socket: all of the server but the arithmetic."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import jax
import numpy as np
import pytest
import tokenizers
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.api.async_llm import AsyncLLM
from jaxllm.api.start import Started
from jaxllm.config.server_args import ServerArgs
from jaxllm.engine.buckets import make_buckets
from jaxllm.engine.build import BuiltEngine, StartTimes
from jaxllm.engine.engine import Engine
from jaxllm.engine.input_builder import InputBuilder, PackedStep
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.model_runner import StepScores
from jaxllm.engine.sampler import ScoreArrays
from jaxllm.engine.step_compiler import SamplerSettings, StepCompiler
from jaxllm.engine.step_inputs import host_views
from jaxllm.engine.watchdog import Watchdog
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.server.app import build_app
from jaxllm.server.draining import DrainingServer
from jaxllm.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 128
MAX_NUM_SEQS = 8
ROOT = Path(__file__).parents[2]


class Read:
    """Tokens of a step that is over at once, or that failed."""

    def __init__(self, tokens: list[int] | Exception, scores: StepScores | None = None):
        self._tokens, self._scores = tokens, scores

    def read(self) -> list[list[int]]:
        if isinstance(self._tokens, Exception):
            raise self._tokens
        return [self._tokens]

    def read_scores(self) -> StepScores | None:
        return self._scores


def scores_of(tokens: Sequence[int], num_best: int, num_named: int = 0) -> ScoreArrays[np.ndarray]:
    """Every token is the best at its place with -0.25; the k-th best is the k-th id from it, with -0.25 times k."""
    ids = np.asarray(tokens)[:, None] + np.arange(num_best)
    best = np.tile(-0.25 * np.arange(1, num_best + 1, dtype=np.float32), (len(tokens), 1))
    named = np.full((len(tokens), num_named), -7.0, np.float32)
    count = len(tokens)
    return ScoreArrays(np.full(count, -0.25, np.float32), np.ones(count, np.int32), best, ids % 256, named)


class AlphabetRunner:
    """Stands in for the model: after n tokens comes the n-th letter of the alphabet, around and around."""

    def __init__(self, letters: list[int]):
        self.step_seconds = 0.0
        self.failure: Exception | None = None
        self.reset_failure: Exception | None = None
        self._letters = letters

    def execute(self, step: PackedStep) -> Read:
        time.sleep(self.step_seconds)
        if self.failure is not None:
            return Read(self.failure)
        lengths = host_views(step.packed[0], step.shape, 1).context_len.tolist()
        tokens = [self._letters[length % 26] for length in lengths]
        sampler = None if step.sampling is None else step.sampling.layout.shape
        scores = None
        if sampler is not None and sampler.has_scores:
            scores = scores_of(tokens, sampler.num_best, sampler.num_named)
        prompt = step.prompt and scores_of(step.prompt.index_and_token[0, 1].tolist(), step.prompt.num_best)
        told = StepScores(scores, () if prompt is None else (prompt,))
        return Read(tokens, jax.tree.map(lambda array: array[None], told))

    def reset(self) -> None:
        if self.reset_failure is not None:
            raise self.reset_failure

    def close(self) -> None:
        pass


def byte_tokenizer() -> Tokenizer:
    """One token per byte; chats are their messages' contents, one after the other."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ suffix }}"
    return Tokenizer(backend, chat_template=template)


class NothingToCompile(StepCompiler):
    """Stands for a compiler whose programs are all there."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), 0, 0, SamplerSettings())


def alphabet_llm(tokenizer: Tokenizer | None) -> tuple[AsyncLLM, AlphabetRunner]:
    """AsyncLLM with all its parts but the device's."""
    ids = byte_tokenizer()
    runner = AlphabetRunner([cast(int, ids.token_to_id(chr(ord("a") + i))) for i in range(26)])
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN),
        BlockPool(129, 8),
        KVGroups((None,)),
    )
    buckets = make_buckets(MAX_NUM_SEQS, 64, MAX_MODEL_LEN // 8, coarse=True)
    builder = InputBuilder(buckets, MAX_NUM_SEQS, MAX_MODEL_LEN // 8, 1, vocab_size=256)
    limits = EngineLimits(vocab_size=256, max_model_len=MAX_MODEL_LEN, max_running=MAX_NUM_SEQS)
    engine = Engine(scheduler, builder, cast(Any, runner), limits, Watchdog(60.0))
    built = BuiltEngine(
        engine=engine,
        runner=cast(Any, runner),
        compiler=NothingToCompile(),
        model=cast(Any, None),
        memory=cast(Any, None),
        buckets=buckets,
        times=StartTimes(),
    )
    return AsyncLLM.from_started(Started(built, tokenizer)), runner


class LiveApp:
    """A running server over the scripted engine."""

    def __init__(self, url: str, server: DrainingServer, llm: AsyncLLM, runner: AlphabetRunner):
        self.url = url
        self.server = server
        self.thread: threading.Thread | None = None
        self.llm = llm
        self.runner = runner
        self.client = httpx.Client(base_url=url, timeout=20.0)

    def post(self, route: str, body: Any) -> httpx.Response:
        return self.client.post(f"/v1/{route}", json=body)

    def events(self, route: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream, each of which httpx must see as one line; [DONE] must be the last."""
        with self.client.stream("POST", f"/v1/{route}", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert response.status_code == 200
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.url)

    def is_empty(self) -> bool:
        stats = self.llm.stats
        return (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0) and not self.llm._listeners

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_for(condition)


def read_metrics(url: str) -> dict[str, float]:
    """Every sample of /metrics: name without vllm:, with the finished_reason in brackets where there is one."""
    samples = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=20.0).text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            if "le" not in sample.labels:
                samples[sample.name.removeprefix("vllm:") + (f"[{reason}]" if reason else "")] = sample.value
    return samples


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits until something holds; fails when it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


@contextmanager
def live_app(
    args: ServerArgs | None = None, tokenizer: Tokenizer | None = None, drain_seconds: float = 0.0, **settings: Any
) -> Iterator[LiveApp]:
    llm, runner = alphabet_llm(tokenizer)
    app = build_app(llm, "alphabet", args or ServerArgs(), **settings)
    config = uvicorn.Config(app, log_config=None)
    ready = threading.Event()
    server = DrainingServer(config, drain_seconds=drain_seconds, on_ready=ready.set, abort_all=llm.abort_all)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        assert ready.wait(20.0)
        live = LiveApp(f"http://127.0.0.1:{listening.getsockname()[1]}", server, llm, runner)
        live.thread = thread
        try:
            yield live
        finally:
            live.client.close()
            server.should_exit = True
            thread.join(20.0)
            assert not thread.is_alive()
            llm.shutdown()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def serve_app() -> Callable[..., Any]:
    """Gives a context manager: ServerArgs and a tokenizer or None -> LiveApp."""
    return live_app


@pytest.fixture(scope="module")
def shared_app(tokenizer: Tokenizer) -> Iterator[LiveApp]:
    """A server for tests that leave it as it was."""
    with live_app(tokenizer=tokenizer) as live:
        yield live


@pytest.fixture
def app(tokenizer: Tokenizer) -> Iterator[LiveApp]:
    with live_app(tokenizer=tokenizer) as live:
        yield live


class ServeProcess:
    """`scripts/serve.py` as a process of its own, on a free port of this machine."""

    def __init__(self, *flags: str, model: str = "smollm2"):
        command = [sys.executable, str(ROOT / "scripts" / "serve.py"), model, "--host", "127.0.0.1", "--port", "0"]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(Path(tempfile.gettempdir()) / f"jaxllm-tests-{os.getuid()}"),
        }
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        self.log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment, cwd=ROOT
        )
        self.greeting = ""
        self.url = ""

    def wait_until_ready(self, seconds: float = 180.0) -> "ServeProcess":
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while "Ctrl-C" not in self.greeting:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            piece = os.read(self.process.stdout.fileno(), 4096) if ready else b""  # unbuffered, as select sees it
            assert piece, f"the server did not start: {self.read_log()}"
            self.greeting += piece.decode()
        self.url = next(word for word in self.greeting.split() if word.startswith(("http://", "https://")))
        return self

    def read_log(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.url)

    def wait_until(self, condition: Callable[[dict[str, float]], bool]) -> None:
        wait_for(lambda: condition(self.metrics()), seconds=60.0)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


SMALL = ("--kv-cache-memory-bytes", "300m", "--max-model-len", "1024", "--max-num-seqs", "32")


@pytest.fixture(scope="session")
def smollm2() -> Iterator[ServeProcess]:
    server = ServeProcess(*SMALL, "--disable-uvicorn-access-log")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


@pytest.fixture
def start_smollm2() -> Iterator[Callable[..., ServeProcess]]:
    """Gives a function from flags to a server of the test's own."""
    servers: list[ServeProcess] = []

    def start(*flags: str) -> ServeProcess:
        servers.append(ServeProcess(*SMALL, *flags))
        return servers[-1].wait_until_ready()

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def serve_process() -> Callable[..., ServeProcess]:
    """Gives a function from flags to a server, which the caller waits for and closes."""
    return lambda *flags: ServeProcess(*SMALL, *flags)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of this machine, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(
        ["openssl", "req", "-x509", *kind, "-keyout", key, "-out", cert, "-days", "2", *subject],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key
