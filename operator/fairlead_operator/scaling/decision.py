"""Decides the number of workers from the present number and the recent recommendations. Pure."""

from collections.abc import Sequence

from fairlead_operator.api.scaling import Scaling
from fairlead_operator.observed import Recommendation, SizeDecision
from fairlead_operator.scaling.recommendation import WINDOW, WorkerPool


def decide(scaling: Scaling, current: int | None, recommendations: Sequence[Recommendation]) -> SizeDecision:
    """Return the size. `current`: the Deployment's size, None before it exists. `recommendations`: oldest first, none after a restart.

    Scale up when every recommendation of a whole window asks for it: then the newest covers the whole step, and noise has no effect.
    From zero scale up without delay. Scale down to the highest recommendation of the stabilization window, and to zero after the idle time.
    """
    if current is None:
        return SizeDecision(max(1, scaling.min_replicas), "first worker")  # a service must prove that it serves before it may scale to zero
    wanted, why = _unbounded(scaling, scaling.within(current), recommendations)
    bounded = scaling.within(wanted)
    if bounded == current:
        return SizeDecision(current)
    why = why if bounded == wanted and why else f"{why or 'bounds'} (spec.scaling allows {scaling.min_replicas} to {scaling.max_replicas})"
    return SizeDecision(bounded, f"{why}: {current} -> {bounded}")


def _unbounded(scaling: Scaling, current: int, recommendations: Sequence[Recommendation]) -> tuple[int, str]:
    if not recommendations:
        return current, ""
    last = recommendations[-1]
    idle = scaling.idle_seconds is not None and last.idle_seconds >= scaling.idle_seconds and not last.has_requests
    if current == 0:
        woken = last.has_requests or (last.had_requests and not idle)
        return (max(1, last.scale_up_to), last.why or "requests came") if woken else (0, "")
    if idle:
        return 0, f"no request for {last.idle_seconds:.0f}s"
    since = last.at
    for one in reversed(recommendations):
        if one.scale_up_to <= current:
            break
        since = one.at
    if last.scale_up_to > current and last.at - since >= WINDOW:
        return last.scale_up_to, last.why
    stable = scaling.stable_seconds
    if recommendations[0].at > last.at - stable:
        return current, ""
    scale_down_to = max(1, *(one.scale_down_to for one in recent_recommendations(recommendations, stable)))
    return (scale_down_to, f"{scale_down_to} workers were enough for {stable:g}s") if scale_down_to < current else (current, "")


def history_seconds(scaling: Scaling, pool: WorkerPool) -> float:
    """Return how long recommendations count: for a scale-down, and as the record of arrivals."""
    return max(scaling.stable_seconds, WINDOW + pool.start_seconds)


def recent_recommendations(recommendations: Sequence[Recommendation], seconds: float) -> Sequence[Recommendation]:
    """Return those of the last `seconds`, and the one before, which was valid until the first of them."""
    oldest = recommendations[-1].at - seconds if recommendations else 0.0
    first = next((number for number, one in enumerate(recommendations) if one.at > oldest), 0)
    return recommendations[max(0, first - 1) :]
