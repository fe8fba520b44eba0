"""Order and time limits of the stages of one run. Correctness and the headline figures come in the first three minutes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Stage = tuple[str, float, Callable[[], Iterator[dict[str, Any]]]]
"""Name, seconds at most, and what gives the rows."""
FIRST = {"compilers": 5.0, "sampling": 35.0, "greedy": 20.0, "compiled": 55.0, "attention": 15.0, "headline": 50.0}
"""Stages of the first three minutes, with their seconds at most."""
WEIGHTS = {
    "filters": 1.0,
    "overlap": 3.0,
    "kernel_busy_time": 3.0,
    "prompt_arrival": 1.5,
    "piecewise": 1.5,
    "lora": 3.0,
    "serving": 8.0,
    "compare": 9.0,
    "logits": 1.0,
    "memory": 2.0,
    "quantized": 5.0,
    "int4_layers": 1.0,
    "fused": 1.0,
    "experts": 1.0,
    "drafts": 1.0,
    "step_time": 1.5,
    "worker_start": 4.0,
    "transformers_batching": 4.0,
    "offline_batch": 2.0,
    "optimisation_gains": 2.0,
    "ranks": 2.0,
}
"""Shares of the time that the first stages leave, in the order of the run. Stages that share a loaded model follow each other."""
DEFAULT_WEIGHT = 2.0
"""Of stages that have none; they come last."""


def order(known: Sequence[Stage]) -> list[Stage]:
    """Return the stages in the order of a run of all of them."""
    places = {name: place for place, name in enumerate((*FIRST, *WEIGHTS))}
    return sorted(known, key=lambda stage: places.get(stage[0], len(places)))


def seconds_for(stage: Stage, later: Sequence[Stage], left: float) -> float:
    """Return the limit of `stage` in a run of all stages, before `later`, with `left` seconds for all of them.

    A stage that ends early leaves its time to the others.
    """
    name, most, _ = stage
    if name in FIRST:
        return min(FIRST[name], most, left)
    weight = WEIGHTS.get(name, DEFAULT_WEIGHT)
    return min(most, left * weight / (weight + sum(WEIGHTS.get(other, DEFAULT_WEIGHT) for other, _, _ in later)))
