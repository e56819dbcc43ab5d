"""`jaxllm diagnose`: what limits an engine, from a file of `jaxllm bench` or a running server. Starts no engine."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config.engine_args import flag
from jaxllm.config.errors import InputError
from jaxllm.options import POSITIONAL, OptionParser, add_options

_SOURCE = "source"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseArgs:
    """Flags of `diagnose`.

    Raises:
        InputError: a value out of range.
    """

    seconds: float = flag(10.0, "how long to watch a server")
    json: str | None = flag(None, "file to write the diagnoses to")

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600:
            raise InputError(f"seconds must be above 0 and at most 3600, got {self.seconds}")


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags."""
    parser.group(POSITIONAL).add_argument(
        _SOURCE,
        metavar="FILE|URL",
        help="JSON of jaxllm bench --output-json, or a server such as http://localhost:8000",
    )
    add_options(parser, DiagnoseArgs, "diagnose")


def run(values: dict[str, Any]) -> int:
    """Diagnoses and prints; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    given = dict(values)
    source = given.pop(_SOURCE)
    args = DiagnoseArgs(**given)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an estimate is arithmetic: a device that is here is left alone
    from jaxllm.diagnose.rules import diagnose

    if source.startswith(("http://", "https://")):
        from jaxllm.diagnose.live_evidence import watch

        seen = [watch(source, args.seconds)]
    else:
        from jaxllm.diagnose.bench_evidence import read_bench

        seen = read_bench(source)
    found = []
    for evidence in seen:
        diagnosis = diagnose(evidence)
        found.append({"name": evidence.name, **dataclasses.asdict(diagnosis)})
        print(f"{evidence.name}: {diagnosis.kind}: {diagnosis.cause}")
        for line in diagnosis.evidence:
            print(f"  {line}")
        if diagnosis.change:
            print(f"  change: {diagnosis.change}")
            print(f"  expect: {diagnosis.effect}")
    if args.json is not None:
        try:
            Path(args.json).expanduser().write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"json={args.json!r} cannot be written: {error.strerror}") from None
    return 0
