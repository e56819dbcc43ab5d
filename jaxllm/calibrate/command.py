"""`jaxllm calibrate`: measures steps on this machine's device and writes its description for plan and simulate."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config.engine_args import DEFAULT_MODEL, flag
from jaxllm.config.errors import InputError
from jaxllm.environment import prepare_environment
from jaxllm.options import OptionParser, add_model_argument, add_options, with_model


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateArgs:
    """Flags of `calibrate`."""

    model: str = flag(DEFAULT_MODEL, "model whose steps are measured, as of serve")
    load_format: str = flag("auto", "as of serve; dummy needs no weights")
    dtype: str = flag("auto", "as of serve")
    max_num_seqs: int | None = flag(None, "most requests in a step; default: the engine's")
    max_num_batched_tokens: int | None = flag(None, "most tokens in a step; default: the engine's")
    max_context: int = flag(1024, "longest context to measure")
    repeats: int = flag(5, "runs of each step, of which the median counts")
    output: str | None = flag(None, "file to write the description to, for --device-file")


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags."""
    add_model_argument(parser)
    add_options(parser, CalibrateArgs, "calibrate")


def run(values: dict[str, Any]) -> int:
    """Measures, fits, prints and writes; gives the exit code.

    Raises:
        InputError: a mistake of the user's, or too few shapes to fit to some and test on others.
    """
    args = CalibrateArgs(**with_model(values))
    for name, least in {"max_context": 64, "repeats": 1}.items():
        if getattr(args, name) < least:
            raise InputError(f"{name}={getattr(args, name)} must be at least {least}")
    from jaxllm.planning.svg import check_file

    check_file("output", args.output, (".json",))
    prepare_environment(os.environ)
    from jaxllm.calibrate.call import calibrate
    from jaxllm.calibrate.measure import Timed
    from jaxllm.planning.tables import print_table

    def progress(timed: Timed) -> None:
        print(f"{timed.shape.program} {timed.case}: {1e3 * timed.seconds:.2f} ms", file=sys.stderr, flush=True)

    made = calibrate(
        args.model,
        args.max_context,
        args.repeats,
        progress,
        load_format=args.load_format,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    print_table("steps", ("step", "context", "measured ms", "model ms", "error", ""), list(made.rows()))
    fitted = f"{made.error_of_fitted:.1%} of the {len(made.fitted)} steps that were fitted to"
    print(f"median error: {fitted}, {made.error_of_tested:.1%} of the {len(made.tested)} others, of other shapes")
    if args.output is not None:
        Path(args.output).expanduser().write_text(json.dumps(made.device.as_json(), indent=2) + "\n")
    return 0
