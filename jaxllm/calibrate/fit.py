"""Timed steps -> the constants of a device for the cost model, and how far off they are. Knows numbers; runs nothing.

Constants are positive, so that their logarithms are fitted, to the logarithms of the times: an error of a tenth counts
alike in a short step and in a long one. What the steps do not tell stays where it began.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxllm.calibrate.measure import Timed
from jaxllm.mesh.cost_model import DeviceSpec, ModelShape, step_time

FITTED = (
    *("read_bandwidth", "copy_bandwidth", "matmul_flops", "attention_flops"),
    *("product_us", "mixed_layer_us", "request_layer_us", "blend"),
)
_ROUNDS = 80
_PRIOR = 0.01  # how much a constant's distance from its beginning weighs, beside errors of steps


def fit(shape: ModelShape, beginning: DeviceSpec, steps: Sequence[Timed]) -> DeviceSpec:
    """Gives the device whose predicted times come nearest to the measured ones, by Levenberg and Marquardt's method."""
    measured = np.log([step.seconds for step in steps])
    first = np.array([_log(name, getattr(beginning, name)) for name in FITTED])

    def residuals(logs: np.ndarray) -> np.ndarray:
        device = _device(beginning, logs)
        times = np.log([predict(shape, device, step) for step in steps])
        return np.concatenate([times - measured, _PRIOR * (logs - first)])

    logs, damping = first.copy(), 1.0
    errors = residuals(logs)
    for _ in range(_ROUNDS):
        slopes = np.stack([(residuals(logs + step) - errors) / 1e-3 for step in 1e-3 * np.eye(len(logs))], axis=1)
        square = slopes.T @ slopes
        change = np.linalg.solve(
            square + damping * (np.diag(np.diag(square)) + 1e-9 * np.eye(len(logs))), -slopes.T @ errors
        )
        tried = logs + np.clip(change, -1.0, 1.0)
        new = residuals(tried)
        if new @ new < errors @ errors:
            logs, errors, damping = tried, new, damping / 3
        else:
            damping *= 4
    return _device(beginning, logs)


def predict(shape: ModelShape, device: DeviceSpec, step: Timed) -> float:
    """Gives the seconds of a step without its host."""
    spent = step_time(shape, device, step.load)
    return spent.total - spent.host


def split(steps: Sequence[Timed]) -> tuple[list[Timed], list[Timed]]:
    """Parts the steps by their padded shapes, as the colours of a chessboard of tokens and requests.

    Decode steps have one row of it, whose last field is fitted to: a test is between two fields or before the first.
    """
    tested = set()
    for program in ("decode", "mixed"):
        shapes = {step.shape for step in steps if step.shape.program == program}
        tokens = sorted({shape.num_tokens for shape in shapes}, reverse=True)
        requests = sorted({shape.num_requests for shape in shapes}) if program == "mixed" else [0]
        for shape in shapes:
            row = requests.index(shape.num_requests) if program == "mixed" else 0
            if (tokens.index(shape.num_tokens) + row) % 2:
                tested.add(shape)
    return [s for s in steps if s.shape not in tested], [s for s in steps if s.shape in tested]


def errors_of(shape: ModelShape, device: DeviceSpec, steps: Sequence[Timed]) -> list[float]:
    """Gives each step's error as a share of what was measured."""
    return [predict(shape, device, step) / step.seconds - 1 for step in steps]


def median_error(errors: Sequence[float]) -> float:
    return statistics.median(map(abs, errors))


def host_of(steps: Sequence[Timed]) -> tuple[float, float]:
    """Gives the microseconds that the host takes to build any step, and those for each request."""
    requests = np.array([step.case.num_requests for step in steps], float)
    slope, constant = np.polyfit(requests, [1e6 * step.build_seconds for step in steps], 1)
    return max(float(constant), 0.0), max(float(slope), 0.0)


def _log(name: str, value: float) -> float:
    return math.log(max(value - (name == "blend"), 1e-3))


def _device(beginning: DeviceSpec, logs: np.ndarray) -> DeviceSpec:
    values = {name: float(np.exp(log)) + (name == "blend") for name, log in zip(FITTED, logs, strict=True)}
    return replace(beginning, **values)
