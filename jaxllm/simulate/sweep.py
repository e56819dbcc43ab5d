"""One traffic on many settings -> which of them nothing beats. Knows shapes and limits; prints nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxllm.config.errors import InputError
from jaxllm.mesh.planner import MeshShape
from jaxllm.simulate.arrivals import Arrival
from jaxllm.simulate.call import Options, Subject, meshes, simulate_on
from jaxllm.simulate.figures import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setting and what came of it, or why nothing did. On the front no other has more throughput and less TPOT."""

    mesh: MeshShape
    max_num_seqs: int
    max_num_batched_tokens: int
    figures: Figures | None = None
    reason: str = ""
    is_on_front: bool = False

    def __str__(self) -> str:
        return f"{self.mesh}, {self.max_num_seqs} requests and {self.max_num_batched_tokens} tokens in a copy's step"


def sweep(
    subject: Subject,
    requests: Sequence[Arrival],
    options: Options,
    num_seqs: Sequence[int],
    token_budgets: Sequence[int],
    progress: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Runs the requests on every shape of the mesh with every pair of limits.

    Raises:
        InputError: a limit is out of range, or no setting at all can run the requests.
    """
    for name, sizes, least in (("sweep_num_seqs", num_seqs, 1), ("sweep_token_budgets", token_budgets, 16)):
        if not sizes or min(sizes) < least:
            raise InputError(f"{name} must be numbers of at least {least}, got {' '.join(map(str, sizes)) or 'none'}")
    trials = []
    for mesh in meshes(subject):
        for budget in token_budgets:
            for rows in num_seqs:
                trials.append(_try(subject, mesh, requests, options, rows, budget))
                progress(trials[-1])
    if all(trial.figures is None for trial in trials):
        raise InputError(f"no setting can run the requests: {trials[0].reason}")
    return mark_front(trials)


def mark_front(trials: Sequence[Trial]) -> list[Trial]:
    """Marks those that no other beats: none is as good in both speed and TPOT, and better in one."""
    points = [(t.figures.tokens_per_second, -t.figures.tpot.mean) for t in trials if t.figures is not None]

    def is_beaten(figures: Figures) -> bool:
        speed, quick = figures.tokens_per_second, -figures.tpot.mean
        return any(s >= speed and q >= quick and (s, q) != (speed, quick) for s, q in points)

    return [replace(t, is_on_front=t.figures is not None and not is_beaten(t.figures)) for t in trials]


def _try(
    subject: Subject, mesh: MeshShape, requests: Sequence[Arrival], options: Options, rows: int, budget: int
) -> Trial:
    trial = Trial(mesh=mesh, max_num_seqs=rows, max_num_batched_tokens=budget)
    try:
        changed = replace(options, max_num_seqs=rows, max_num_batched_tokens=budget)
        return replace(trial, figures=simulate_on(subject, mesh, requests, changed))
    except InputError as error:
        return replace(trial, reason=str(error))
