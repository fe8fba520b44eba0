"""The number of workers, from the one that is and what was needed lately. Pure."""

from collections.abc import Sequence

from fairlead_operator.api.scaling import Scaling
from fairlead_operator.observed import Decision, Need
from fairlead_operator.scaling.needs import WINDOW


def decided(scaling: Scaling, current: int | None, needs: Sequence[Need]) -> Decision:
    """`current`: what the Deployment says, None before there is one. `needs`: oldest first; none are known after the operator's restart.

    Up when it was needed for a whole window (so the newest need is that of the whole step, and noise does nothing), from zero at once.
    Down to the most that was needed in the time of stabilization. To zero when nobody asked for long enough.
    """
    if current is None:
        return Decision(max(1, scaling.min_replicas), "first worker")  # a service proves that it serves before it may go to zero
    wanted, why = _unbounded(scaling, scaling.within(current), needs)
    bounded = scaling.within(wanted)
    if bounded == current:
        return Decision(current)
    why = why if bounded == wanted and why else f"{why or 'bounds'} (spec.scaling allows {scaling.min_replicas} to {scaling.max_replicas})"
    return Decision(bounded, f"{why}: {current} -> {bounded}")


def _unbounded(scaling: Scaling, current: int, needs: Sequence[Need]) -> tuple[int, str]:
    if not needs:
        return current, ""
    last = needs[-1]
    idle = scaling.idle_seconds is not None and last.idle_seconds >= scaling.idle_seconds and not last.asked
    if current == 0:
        woken = last.asked or (last.lately and not idle)
        return (max(1, last.more), last.why or "requests came") if woken else (0, "")
    if idle:
        return 0, f"no request for {last.idle_seconds:.0f}s"
    since = last.at
    for one in reversed(needs):
        if one.more <= current:
            break
        since = one.at
    if last.more > current and last.at - since >= WINDOW:
        return last.more, last.why
    stable = scaling.stable_seconds
    if needs[0].at > last.at - stable:
        return current, ""
    fewest = max(1, *(one.fewest for one in recent(needs, stable)))
    return (fewest, f"{fewest} workers were enough for {stable:g}s") if fewest < current else (current, "")


def recent(needs: Sequence[Need], seconds: float) -> Sequence[Need]:
    """Those of the last `seconds`, and the one before, which held until the first of them."""
    oldest = needs[-1].at - seconds if needs else 0.0
    first = next((number for number, one in enumerate(needs) if one.at > oldest), 0)
    return needs[max(0, first - 1) :]
