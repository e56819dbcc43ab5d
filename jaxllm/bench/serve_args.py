"""The flags of `jaxllm bench serve`, with vLLM's names where it has them. Knows names, types, ranges: sends nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxllm.bench.args import WORKLOAD_NAMES
from jaxllm.config.engine_args import flag
from jaxllm.config.errors import InputError

BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
MEASURES = ("ttft", "tpot", "itl", "e2el")
_TARGETS = ("ttft", "tpot", "e2el")
_RANDOM = (1000, 1024, 128)  # requests, prompt tokens, output tokens; vLLM's defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchArgs:
    """Flags of `bench serve`.

    Raises:
        InputError: a value out of range, or two that contradict each other.
    """

    backend: str = flag(
        "openai", "openai (completions, prompts are token ids; vllm is the same) or openai-chat (words)"
    )
    base_url: str | None = flag(None, "the server, such as http://localhost:8000; default: --host and --port")
    host: str = flag("127.0.0.1", "the server's address")
    port: int = flag(8000, "the server's port")
    endpoint: str | None = flag(None, "the route; default: /v1/completions or /v1/chat/completions")
    api_key: str | None = flag(None, "key for the server; default: the environment's OPENAI_API_KEY")
    header: tuple[str, ...] = flag((), "headers of every request, as KEY=VALUE")
    model: str | None = flag(None, "name of the model on the server; default: the first that it lists")
    vocab_size: int | None = flag(None, "token ids stay below it; default: found out by asking")
    workload: str | None = flag(None, f"requests of the comparison: {', '.join(WORKLOAD_NAMES)}")
    trace: str | None = flag(None, "JSON Lines with input_length, output_length and, if you like, timestamp (ms)")
    dataset_name: str = flag("random", "where requests come from without the two above; random is the only one so far")
    num_prompts: int | None = flag(None, "requests; default 1000, or all of a workload or trace")
    input_len: int | None = flag(None, "tokens in each random prompt; default 1024")
    output_len: int | None = flag(None, "tokens to generate for each; default 128")
    random_input_len: int | None = flag(None, "the same as --input-len")
    random_output_len: int | None = flag(None, "the same as --output-len")
    random_prefix_len: int = flag(0, "tokens, the same for all, before each random prompt")
    request_rate: float | None = flag(
        None, "requests a second; inf sends all at once; default: a trace's times, or inf"
    )
    burstiness: float = flag(1.0, "1 is a Poisson process, below it requests come in bursts, above more evenly")
    max_concurrency: int | None = flag(
        None, "most requests under way; those beyond wait here, and their clocks with them"
    )
    num_warmups: int = flag(0, "requests before those that count, with other tokens")
    seed: int = flag(0, "of prompts and arrivals")
    temperature: float | None = flag(0.0, "of the sampling; 0 is greedy")
    ignore_eos: bool = flag(
        True, "have exactly the output length generated; off for servers that do not know the field"
    )
    extra_body: Mapping[str, Any] | None = flag(None, "more fields of every request, as a JSON object")
    goodput: tuple[str, ...] = flag((), "targets in ms, as ttft:200 tpot:50 e2el:5000; requests that meet all count")
    find_max_rate: bool = flag(False, "search for the highest rate at which enough requests meet the --goodput targets")
    goodput_share: float = flag(0.9, "share of the requests that is enough for --find-max-rate")
    rate_tolerance: float = flag(0.1, "the search ends when it knows the rate so well")
    percentile_metrics: str = flag(",".join(MEASURES), "what to tell of ttft, tpot, itl and e2el")
    metric_percentiles: str = flag("50,90,99", "which percentiles to tell of each")
    ready_check_timeout_sec: float = flag(0.0, "seconds to wait for the server to answer at first")
    timeout: float = flag(600.0, "a request fails when the server says nothing for so many seconds")
    output_json: str | None = flag(None, "file to write everything measured to")
    save_result: bool = flag(False, "write such a file below --result-dir")
    result_dir: str = flag(".", "folder of --save-result")
    result_filename: str | None = flag(None, "name of the file of --save-result; default: made of rate, model and time")
    save_detailed: bool = flag(False, "write every request's times to that file too")
    plot: str | None = flag(
        None, "charts to write, .svg, .html or (with matplotlib) .png: times over the run, and how they are spread"
    )

    def __post_init__(self) -> None:
        self._check_server()
        least = {"num_prompts": 1, "input_len": 1, "output_len": 1, "random_input_len": 1, "random_output_len": 1}
        least |= {"random_prefix_len": 0, "max_concurrency": 1, "num_warmups": 0, "vocab_size": 128}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise InputError(f"{name} must be at least {limit}, got {value}")
        for name in ("request_rate", "burstiness", "timeout", "rate_tolerance"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} must be above 0, got {value:g}")
        if not 0 < self.goodput_share <= 1:
            raise InputError(f"goodput_share must be above 0 and at most 1, got {self.goodput_share:g}")
        self._check_requests()
        if not self.targets() and self.find_max_rate:
            raise InputError("find_max_rate needs targets, such as --goodput ttft:200 tpot:50")
        self.measures()
        self.percentiles()

    def _check_server(self) -> None:
        if self.backend not in BACKENDS:
            raise InputError(f"backend={self.backend!r} is not known; choose one of {', '.join(BACKENDS)}")
        if not 1 <= self.port <= 65535:
            raise InputError(f"port={self.port} is not between 1 and 65535")
        if self.base_url is not None:
            try:
                parts = urlsplit(self.base_url)
                is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                is_address = False
            if not is_address:
                raise InputError(f"base_url={self.base_url!r} is no address; it looks like http://localhost:8000")
        self.headers()

    def _check_requests(self) -> None:
        if self.dataset_name != "random":
            raise InputError(
                f"dataset_name={self.dataset_name!r} is not supported; leave it at 'random', or give workload or trace"
            )
        for name in ("input_len", "output_len"):
            own, same = getattr(self, name), getattr(self, f"random_{name}")
            if own is not None and same is not None and own != same:
                raise InputError(f"{name}={own} and random_{name}={same} say the same differently: keep one")
        if self.workload is None:
            pass
        elif self.workload not in WORKLOAD_NAMES:
            raise InputError(f"workload={self.workload!r} is not known; there are {', '.join(WORKLOAD_NAMES)}")
        elif self.trace is not None:
            raise InputError(f"workload={self.workload!r} and trace={self.trace!r} both say what to send: keep one")
        if self.workload is not None or self.trace is not None:
            beside = "a workload" if self.trace is None else "a trace"
            for name in ("input_len", "output_len", "random_input_len", "random_output_len", "random_prefix_len"):
                if getattr(self, name):
                    raise InputError(
                        f"{name}={getattr(self, name)} is given beside {beside}, which tells that: keep one"
                    )

    @property
    def root(self) -> str:
        """The server's address without a slash at its end and without /v1."""
        given = self.base_url or f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        return given.rstrip("/").removesuffix("/v1")

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.root + "/" + (self.endpoint or BACKENDS[self.backend]).lstrip("/")

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Requests, prompt tokens and output tokens of random requests."""
        given = self.num_prompts, self.input_len or self.random_input_len, self.output_len or self.random_output_len
        count, num_in, num_out = (value or usual for value, usual in zip(given, _RANDOM, strict=True))
        return count, num_in, num_out

    def headers(self) -> dict[str, str]:
        """Gives the headers that the user wants sent."""
        for each in self.header:
            if not each.partition("=")[1]:
                raise InputError(f"header: {each!r} is not KEY=VALUE")
        return {each.partition("=")[0]: each.partition("=")[2] for each in self.header}

    def targets(self) -> dict[str, float]:
        """Gives the targets in seconds."""
        found = {}
        for each in (word for given in self.goodput for word in given.split(",") if word):
            name, _, value = each.partition(":")
            try:
                found[name] = float(value) / 1e3
            except ValueError:
                raise InputError(f"goodput: {each!r} is not NAME:MILLISECONDS, such as ttft:200") from None
            if name not in _TARGETS:
                raise InputError(f"goodput: {name!r} is not known; there are {', '.join(_TARGETS)}")
            if not 0 < found[name] < math.inf:
                raise InputError(f"goodput: {each!r} leaves no time: it must be above 0 ms")
        return found

    def measures(self) -> list[str]:
        """Gives what to tell percentiles of."""
        names = [name for name in self.percentile_metrics.split(",") if name]
        for name in names:
            if name not in MEASURES:
                raise InputError(f"percentile_metrics: {name!r} is not known; there are {', '.join(MEASURES)}")
        return names

    def percentiles(self) -> list[float]:
        """Gives the percentiles to tell, from small to large."""
        try:
            found = sorted({float(word) for word in self.metric_percentiles.split(",") if word})
        except ValueError:
            found = [-1.0]
        if not found or not all(0 <= value <= 100 for value in found):
            raise InputError(
                f"metric_percentiles={self.metric_percentiles!r} are not numbers from 0 to 100, such as 50,99"
            )
        return found

    def result_file(self, model: str, date: str) -> str | None:
        """Names the file of results, where there is to be one."""
        if self.output_json is not None or not self.save_result:
            return self.output_json
        rate = "search" if self.find_max_rate else f"{self.request_rate or math.inf:g}qps"
        return str(Path(self.result_dir) / (self.result_filename or f"{rate}-{model.replace('/', '-')}-{date}.json"))
