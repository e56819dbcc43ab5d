"""`jaxllm plan`: which mesh shape, batch and budget for a model, devices and traffic. Needs no accelerator."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config.engine_args import DEFAULT_MODEL, flag
from jaxllm.config.errors import InputError
from jaxllm.config.writable import check_writable
from jaxllm.options import OptionParser, add_model_argument, add_options, with_model

MODEL_HELP = "packaged name, known shape (llama-3.1-70b), folder, config.json or hub id"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArgs:
    """Flags of `plan`."""

    model: str = flag(DEFAULT_MODEL, MODEL_HELP)
    devices: str | None = flag(None, "how many of which device: 8xA100-80G, 2xH200, 4xH100, 4xL40S")
    device_file: str | None = flag(None, "JSON description of the device, instead of a known one")
    input_len: int | None = flag(None, "mean tokens of a prompt; default 1024")
    output_len: int | None = flag(None, "mean tokens of an answer; default 128")
    request_rate: float | None = flag(None, "requests a second over all devices; default: as many as can be")
    trace: str | None = flag(
        None, "JSON Lines with input_length, output_length and timestamp (ms), instead of the three"
    )
    ttft_ms: float | None = flag(None, "most milliseconds to the first token")
    tpot_ms: float | None = flag(None, "most milliseconds per token after it, in the mean")
    max_num_seqs: int | None = flag(None, "requests running at once in a copy; default: to be chosen")
    max_num_batched_tokens: int = flag(8192, "most tokens in a step")
    block_size: int = flag(16, "tokens in a KV block")
    gpu_memory_utilization: float = flag(0.9, "share of the memory for weights, temporaries and KV pool")
    dtype: str = flag("auto", "auto, float32, bfloat16 or float16; auto is the model's 16-bit type")
    kv_cache_dtype: str = flag("auto", "auto (the model's dtype), fp8, bfloat16, float16 or float32")
    json: str | None = flag(None, "file to write the whole plan to")
    plot: str | None = flag(
        None, "picture to write, .svg, .html or (with matplotlib) .png: throughput against latency, a curve per shape"
    )


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags."""
    add_model_argument(parser)
    add_options(parser, PlanArgs, "plan")


def run(values: dict[str, Any]) -> int:
    """Plans and prints; gives the exit code: 1 where no shape does what is asked.

    Raises:
        InputError: a mistake of the user's.
    """
    args = PlanArgs(**with_model(values))
    if args.devices is None and args.device_file is None:
        raise InputError("devices is missing: name them, such as --devices 8xA100-80G")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # arithmetic: a device that is here is left alone
    from jaxllm.planning.call import plan
    from jaxllm.planning.plot import check_plot, write_plot
    from jaxllm.planning.tables import as_json, print_plan

    check_plot(args.plot)
    check_writable("json", args.json)
    options = dataclasses.asdict(args)
    for name in ("json", "plot", "trace"):
        options.pop(name)
    options |= _traffic(args)
    made = plan(options.pop("model"), options.pop("devices") or "1", **options)
    print_plan(made)
    if args.json is not None:
        Path(args.json).expanduser().write_text(json.dumps(as_json(made), indent=2) + "\n")
    if args.plot is not None:
        write_plot(made, args.plot)
    return 0 if made.for_throughput is not None else 1


def _traffic(args: PlanArgs) -> dict[str, Any]:
    if args.trace is None:
        return {"input_len": args.input_len or 1024, "output_len": args.output_len or 128}
    for name in ("input_len", "output_len"):
        if getattr(args, name) is not None:
            raise InputError(f"{name} is given beside a trace, which has lengths of its own: keep one")
    from jaxllm.planning.traffic import means_of, read_trace

    input_len, output_len, rate = means_of(read_trace(args.trace))
    return {"input_len": input_len, "output_len": output_len, "request_rate": args.request_rate or rate}
