"""Whatever pods do, and in whatever order: conditions hold exactly for what they name, do not flap, and no capacity is lost silently.

Each seed is one history of a service (`histories.World`). FAIRLEAD_STATUS_HISTORIES sets their number: each takes 0.1 s of a core, and the
first six find every planted fault.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.causes import pods as pod_causes
from fairlead_operator.observed import Replicas
from fairlead_operator.status import capacity, obstacles, progress, serving
from fairlead_operator.status.conditions import find

from .histories import DEADLINE, FAULTS, SILENT, START, World
from .kstatus import compute_kstatus

HISTORIES = int(os.environ.get("FAIRLEAD_STATUS_HISTORIES", "60"))
STEPS = 40
GRACE = 600  # seconds that capacity may be missing outside of a step
BATCH = 30  # histories of one test
_WAITS = (1.0, 5.0, 30.0, 60.0, 130.0, 310.0)


def act(world: World, chance: random.Random) -> None:
    """Change the spec, a pod, or what completions answer."""
    pods = [pod for pod in world.pods if pod.state != "Evicted"]
    pod = chance.choice(pods) if pods else None
    match chance.choices(range(9), weights=[4, 3, 3, 2, 2, 2, 2, 3, 4])[0]:
        case 0 if pod:
            world.put(pod, chance.choice(FAULTS), stuck=chance.random() < 0.5)
        case 1 if pod and pod.state == "Ready":
            world.put(pod, "NotReady", stuck=chance.random() < 0.7)
        case 2 if pod:
            world.put(pod, chance.choice(SILENT), stuck=chance.random() < 0.5)
        case 3 if pod:
            world.put(pod, "Evicted")
        case 4:
            world.edit()
        case 5:
            world.resize(chance.randint(0 if world.scaled_to_zero else 1, 4))
        case 6:
            world.router_fails = not world.router_fails
            world.changes += 1
        case 7:
            mend(world)
        case _:
            pass


def mend(world: World) -> None:
    for pod in world.pods:
        pod.stuck = False


def history(seed: int) -> None:
    chance = random.Random(seed)
    world = World(
        chance, scaled_to_zero=chance.random() < 0.4, strategy=chance.choice(["Surge", "DrainFirst"]), desired=chance.randint(1, 4)
    )
    for _ in range(STEPS):
        if chance.random() < 0.5:
            act(world, chance)
        advance(world, chance.choice(_WAITS))
    mend(world)
    world.router_fails = False
    if not world.desired and not world.scaled_to_zero:
        world.resize(1)
    for _ in range(60):
        advance(world, 6.0)
        if settled(world):
            break
    advance(world, 20.0)
    check_rest(world)


def settled(world: World) -> bool:
    return all(pod.state in ("Ready", "Evicted") for pod in world.pods) and not world.old and len(world.of("worker")) == world.desired


def advance(world: World, seconds: float) -> None:
    """Advance the clock. The operator looks at each change, and at the times that it has set itself."""
    world.tick(seconds)
    note(world)
    before, changes = world.status, world.changes
    wake_at = world.result.wake_at if world.result is not None else None
    world.reconcile()
    check(world, before)
    if wake_at is not None and world.result is not None and (again := world.result.wake_at) is not None and again - world.now < 1000:
        world.now = max(world.now, again)
        before = world.status
        note(world)
        world.reconcile()
        assert world.changes == changes
        check(world, before)
        check_only_time_passed(before, world.status)


def note(world: World) -> None:
    """Note since when the service serves, and since when it is short of pods."""
    world.served_at = (world.served_at or world.now) if world.serves else None
    needed = world.desired - (world.strategy == "DrainFirst" and world.old > 0)
    short = world.ready("worker") < needed or ((world.scaled_to_zero or world.ready("worker") > 0) and world.ready("router") < 2)
    world.short_at = (world.short_at or world.now) if short else None


def truth(status: ServiceStatus, type_: str) -> bool:
    one = find(status.conditions, type_)
    return one is not None and one.status == "True"


def reason(status: ServiceStatus, type_: str) -> str:
    one = find(status.conditions, type_)
    return one.reason if one is not None else ""


def check(world: World, before: ServiceStatus) -> None:
    status = world.status
    assert world.look().status == status, "the same state is written once"
    check_ready(world, before)
    check_progress(world, before)
    check_faults(world)
    check_available(world)


def check_ready(world: World, before: ServiceStatus) -> None:
    status = world.status
    ready, why = truth(status, "Ready"), reason(status, "Ready")
    if why == "Serving":
        assert ready and world.serves, "Ready, and no pod can serve"
        assert reason(before, "Ready") == "Serving" or world.probed_at == world.now, "Ready without a completion"
    if why == "Asleep":
        assert ready and world.scaled_to_zero and world.desired == 0 and world.ready("router") > 0
    if why == "Waking":
        assert ready and world.scaled_to_zero and world.ready("router") > 0 and reason(before, "Ready") in ("Asleep", "Waking", "Serving")
    if truth(before, "Ready") and reason(before, "Ready") == "Serving" and world.serves and why != "RequestFailed":
        assert ready, f"it serves, and was Ready before: {why}"
    if world.serves and not world.router_fails and why != "RequestFailed":  # the probe is repeated within 15 s
        assert ready and why == "Serving", f"it serves and a completion went through: {why}"
    if world.scaled_to_zero and world.desired == 0 and world.ready("router") and not world.ready("worker"):
        assert ready and why == "Asleep"
    one = find(status.conditions, "Ready")
    assert one is not None
    if why == "Serving" and one.observed_generation == world.generation:
        assert (
            world.generation == 1 or not world.old or world.stepped_at < START + 1 or one.observed_generation == find_generation(before)
        ), "an edit is not proven by the pods of another revision"


def find_generation(status: ServiceStatus) -> int:
    one = find(status.conditions, "Ready")
    return one.observed_generation if one is not None else 0


def check_progress(world: World, before: ServiceStatus) -> None:
    status = world.status
    progressing, why = truth(status, "Progressing"), reason(status, "Progressing")
    kept = {one.type for one in status.conditions if one.type in ("Reconciling", "Stalled")}
    assert all(truth(status, one) for one in kept), "abnormal conditions are absent while they are False"
    assert ("Reconciling" in kept) == progressing and len(kept) <= 1
    assert "Stalled" not in kept or (truth(status, "Degraded") and why != "Complete"), "a stalled step is a fault"
    settled = reason(before, "Progressing") == "Complete" and before.observed_generation == world.generation
    if settled and before.desired_replicas == world.desired and not world.old:
        assert not progressing, f"nothing was edited or resized, and it is {why}"
    if world.old:
        assert why != "Complete"
    if why == "Complete" and not settled:
        assert world.ready("worker") == world.desired == len(world.of("worker")) and (truth(status, "Ready") or not world.scaled_to_zero)


def check_faults(world: World) -> None:
    status = world.status
    degraded, why = truth(status, "Degraded"), reason(status, "Degraded")
    pods = [pod for pod in world.pods if pod.state != "Evicted"]
    visible = {pod.state for pod in pods if pod.state in FAULTS}
    visible |= {"NotReady" for pod in pods if pod.state == "NotReady" and world.now - pod.since >= 120}
    names = {*visible, "CrashLoopBackOff"} if "Crashed" in visible else visible
    names |= {"CreateContainerConfigError"} if "FailedMount" in visible else set()
    evicted = any(pod.state == "Evicted" for pod in world.pods)
    if visible:
        assert degraded, f"{visible} and no fault"
        assert why in names | {"Evicted"}, f"{why} hides the pod's own cause {visible}"
    short = world.now - world.short_at if world.short_at is not None else 0.0
    grace = GRACE if reason(status, "Progressing") == "Complete" else DEADLINE
    if world.short_at is not None and short >= grace:
        assert degraded, f"short of pods for {short:.0f} s without a fault"
    late = short >= GRACE - 1
    failing = world.probe is not None and world.probe.attempts >= serving.FAULT_ATTEMPTS
    assert not degraded or visible or evicted or late or failing, f"{why} without a fault of a pod"
    if why == "Evicted":
        assert world.short_at is not None or reason(status, "Progressing") != "Complete", "it was replaced"
        told = find(status.conditions, "Degraded")
        (named,) = [pod for pod in world.pods if told is not None and f"pod {pod.name} was evicted" in told.message]
        assert world.short_at is None or named.since >= world.short_at - 60, "it ended before the trouble began"
    if status.reduced_since is not None:
        assert world.short_at is not None
    assert (status.reduced_since is None) == (world.short_at is None)


def check_available(world: World) -> None:
    status, ready = world.status, world.ready("worker")
    available, why = truth(status, "Available"), reason(status, "Available")
    if why in ("Asleep", "Waking"):
        assert available and reason(status, "Ready") == why
        return
    size = min(world.desired, 0) if world.scaled_to_zero else world.desired
    floor = max(1, size - 1)
    assert available == (world.serves and (ready >= floor or not world.desired)), why
    share = find(status.conditions, "Available")
    assert share is not None and f"{ready} of {world.desired} workers" in share.message


def check_only_time_passed(before: ServiceStatus, after: ServiceStatus) -> None:
    """No pod changed between these two: only a deadline, or a probe, may change a condition, and it does not change back."""
    assert not (truth(before, "Degraded") and not truth(after, "Degraded")) or reason(before, "Degraded") == "RequestFailed"
    assert truth(before, "Progressing") or not truth(after, "Progressing")
    if truth(before, "Ready") and not truth(after, "Ready"):
        assert reason(before, "Ready") == "Waking" or reason(after, "Ready") == "RequestFailed"


def check_rest(world: World) -> None:
    """All was mended long ago."""
    status = world.status
    assert truth(status, "Ready") and reason(status, "Progressing") == "Complete", status.conditions
    assert not truth(status, "Degraded"), find(status.conditions, "Degraded")
    assert compute_kstatus(status.model_dump(mode="json", by_alias=True), world.generation) == "Current"


@pytest.mark.parametrize("first", range(0, HISTORIES, BATCH))
def test_conditions_hold_exactly_for_what_they_name(first: int) -> None:
    for seed in range(first, min(first + BATCH, HISTORIES)):
        try:
            history(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def forgets_lost_capacity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capacity, "GRACE", 1e9)


def counts_pods_that_ended_long_ago(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pod_causes, "_ended_at", lambda pod: float("inf"))


def calls_each_shortfall_a_rollout(patch: pytest.MonkeyPatch) -> None:
    joined, begun = progress.StepMemory.joined, progress.StepMemory(True, False)

    def join(self: progress.StepMemory, workers: Replicas, routers: Replicas) -> progress.StepMemory:
        return joined(self, workers, routers) if workers.complete else begun

    patch.setattr(progress.StepMemory, "joined", join)


def is_ready_only_when_complete(patch: pytest.MonkeyPatch) -> None:
    of = serving.Serving.of

    def make(service: InferenceService, workers: Replicas, *rest: Any) -> serving.Serving:
        return of(service, workers, *rest) if workers.complete else serving.Serving(False)

    patch.setattr(serving.Serving, "of", make)


def trusts_pods_without_a_completion(patch: pytest.MonkeyPatch) -> None:
    proven = serving.ProbeState(proven=True)
    patch.setattr(serving.ProbeState, "of", lambda *given, serves, **state: proven if serves else serving.ProbeState())


def keeps_ready_without_pods(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(serving.ProbeState, "of", lambda *given, **state: serving.ProbeState(kept=given[0] is not None))


def forgets_routers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(obstacles, "_find_router_obstacle", lambda *given: None)


@pytest.mark.parametrize(
    "fault",
    [
        forgets_lost_capacity,
        counts_pods_that_ended_long_ago,
        calls_each_shortfall_a_rollout,
        is_ready_only_when_complete,
        trusts_pods_without_a_completion,
        keeps_ready_without_pods,
        forgets_routers,
    ],
)
def test_a_planted_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            for seed in range(100):
                history(seed)
