"""What a suite measures, in which order, and how often an engine starts for it. Knows flags and names only."""

from dataclasses import dataclass

from jaxllm.bench.args import SuiteArgs, workload_names

WORKLOADS = ("L1", "L8", "W1", "W2", "W3")
MANY_ROWS_WORKLOADS = ("W1",)  # what engines of --more-seqs run
COMPARED_WORKLOAD = "H1"


@dataclass(frozen=True, slots=True)
class Part:
    """One start of one engine, and what it measures."""

    model: str
    num_seqs: int
    workloads: tuple[str, ...]
    engine: str = "jaxllm"


def plan(args: SuiteArgs) -> list[Part]:
    """Lists the parts, the most telling ones first: a run may end early."""
    asked = workload_names(args.workload)

    def chosen(workloads: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in workloads if not asked or name in asked)

    compared = (COMPARED_WORKLOAD,) if args.engine == "both" or COMPARED_WORKLOAD in asked else ()
    parts = [Part(model, args.num_seqs, chosen(WORKLOADS + compared)) for model in args.models]
    if args.more_seqs:
        parts += [Part(model, args.more_seqs, chosen(MANY_ROWS_WORKLOADS)) for model in args.models]
    if args.engine == "both":
        parts += [Part(model, args.num_seqs, (COMPARED_WORKLOAD,), "hf") for model in args.models]
    return [part for part in parts if part.workloads]
