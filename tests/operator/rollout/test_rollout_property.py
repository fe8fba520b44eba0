"""Whatever is edited, and whenever: a service converges, nothing oscillates, availability is kept, what is taken back restarts nothing.

The operator's own code on a simulated cluster (tests/operator/simulated); each seed is one history.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.simulated.cluster import SERVICE, WORKER, Cluster

from fairlead_operator import revisions
from fairlead_operator.api.rollout import Rollout
from fairlead_operator.children import worker
from fairlead_operator.reconcile import applier
from fairlead_operator.rollout import node_capacity as room
from fairlead_operator.rollout import step, strategy

SEEDS = int(os.environ.get("FAIRLEAD_ROLLOUT_SEEDS", "10"))  # more of them: a longer search
QUIET = 300.0  # seconds in which nothing may be written any more
ROLLOUT = {"progressDeadlineSeconds": 120, "drainTimeoutSeconds": 60}


def revision(number: int, *, broken: bool = False) -> dict[str, object]:
    return {"maxNumSeqs": number, "args": ["--broken"] if broken else []}


def act(cluster: Cluster, chance: random.Random) -> None:
    """A change from outside to a service, its children, its nodes or its operator."""
    if SERVICE not in cluster.api.objects:
        cluster.create(replicas=chance.randint(0, 3), rollout=ROLLOUT, engine=revision(1))
        return
    pods = cluster.workers()
    what = chance.choices(range(12), weights=[6, 2, 3, 1, 2, 2, 2, 2, 1, 1, 2, 1])[0]
    if what == 0:
        cluster.edit(engine=revision(chance.randint(1, 7)))
    elif what == 1:
        cluster.edit(engine=revision(chance.randint(1, 3), broken=True))
    elif what == 2:
        cluster.edit(replicas=chance.randint(0, 4))
    elif what == 3:
        cluster.api.remove(SERVICE)
    elif what == 4:
        cluster.edit(rollout={"strategy": chance.choice(["Auto", "Auto", "Surge", "DrainFirst"])})
    elif what == 5:
        cluster.edit(rollout={"paused": chance.random() < 0.4})
    elif what == 6:
        cluster.restart_operator(worker_image=chance.choice(["worker:1", "worker:2"]))
    elif what == 7 and WORKER in cluster.api.objects:
        edits = [{"replicas": 9}, {"paused": True}, {"strategy": {"rollingUpdate": {"maxSurge": 2, "maxUnavailable": 3}}}]
        cluster.api.edit(WORKER, {"spec": chance.choice(edits)})
    elif what == 8 and WORKER in cluster.api.objects:
        cluster.api.remove(WORKER)
    elif what == 9:
        kept = [key[1] for key in cluster.api.objects if key[0] == "ControllerRevision" and "-worker-" in key[1]]
        cluster.edit(rollout={"revision": chance.choice([*kept, "qwen-worker-0123456789", None, None])})
    elif what == 10 and pods:
        cluster.nodes.fail(chance.choice(pods)) if chance.random() < 0.5 else cluster.nodes.end_pod(chance.choice(pods))
    elif what == 11:
        cluster.nodes.capacity[chance.randrange(len(cluster.nodes.capacity))] = chance.randint(1, 3)


def history(seed: int) -> None:
    """Random edits, then a last one that can be met: it is, and then all is quiet."""
    chance = random.Random(seed)
    cluster = Cluster(chance, [chance.randint(1, 3) for _ in range(2)])
    for _ in range(chance.randint(3, 12)):
        act(cluster, chance)
        cluster.run(chance.choice([0.0, 2.0, 10.0, 40.0, 120.0]))
    if SERVICE not in cluster.api.objects:
        cluster.create(replicas=2, rollout=ROLLOUT)
    wanted = chance.randint(0, 4)
    cluster.nodes.capacity[0] = max(0, wanted - sum(cluster.nodes.capacity[1:])) + chance.randint(0, 1)
    strategy = chance.choice(["Auto", "Auto", "DrainFirst"])
    rollout = {"paused": False, "revision": None, "strategy": strategy}
    before = len(cluster.flips)
    cluster.edit(replicas=wanted, engine=revision(chance.randint(1, 9)), rollout=rollout)
    settle(cluster)
    last = [drains for template, drains in cluster.flips[before:] if template == cluster.flips[-1][0]]
    assert last == sorted(last), "within one revision Auto goes from surging to draining, and never back"
    quiet(cluster)


def settle(cluster: Cluster) -> None:
    cluster.run(3000.0, until=lambda: cluster.complete)
    assert cluster.complete, (cluster.condition("Progressing"), cluster.condition("Ready"), cluster.flips[-4:])


def quiet(cluster: Cluster) -> None:
    """Nothing is written any more, by the operator that runs or by its successor."""
    cluster.run(60.0)
    written, flips = len(cluster.api.writes), len(cluster.flips)
    cluster.restart_operator()
    cluster.run(QUIET)
    assert cluster.api.writes[written:] == [] and len(cluster.flips) == flips, "writes without a difference"
    assert cluster.condition("Progressing")["reason"] == "Complete"


def taken_back(seed: int) -> None:
    """Edits follow each other faster than they roll; then the first spec comes back, perhaps under a newer operator."""
    chance = random.Random(seed)
    wanted = chance.randint(1, 4)
    strategy = chance.choice(["Auto", "Surge", "DrainFirst"])
    cluster = Cluster(chance, [wanted + (1 if strategy == "Surge" else chance.randint(0, 1))])
    cluster.create(replicas=wanted, rollout=ROLLOUT | {"strategy": strategy}, engine=revision(1))
    settle(cluster)
    template = cluster.api.objects[WORKER]["spec"]["template"]
    for number in range(2, chance.randint(3, 10)):
        cluster.edit(engine=revision(number, broken=chance.random() < 0.3))
        cluster.run(chance.choice([1.0, 10.0, 50.0]))
        if chance.random() < 0.3:
            cluster.restart_operator(worker_image=f"worker:{number}")
    left = [pod for pod in cluster.workers() if pod["sim"].set.template == template]
    cluster.edit(engine=revision(1))
    cluster.run(60.0, until=lambda: cluster.api.objects[WORKER]["spec"]["template"]["spec"]["containers"][0]["args"] == args(template))
    left = [pod["metadata"]["uid"] for pod in left if pod in cluster.workers()]
    settle(cluster)
    assert not left or cluster.api.objects[WORKER]["spec"]["template"] == template, "the template that workers still ran, as it was"
    assert set(left) <= {pod["metadata"]["uid"] for pod in cluster.workers()}, "a worker of the first spec was restarted"
    quiet(cluster)


def args(template: Any) -> Any:
    return template["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_is_done_it_converges_and_availability_is_kept(seed: int) -> None:
    history(seed)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_reverted_edit_restarts_no_worker(seed: int) -> None:
    taken_back(seed)


def waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(room, "find_pending", lambda pods, deployment, wanted, events: None)


def drains_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollout, "surge_timeout_seconds", property(lambda self: 0), raising=False)


def ignores_departures(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(room.DepartureTracker, "since", lambda self, pods, now: 0.0)


def drains_two(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(step.DRAIN, "maxUnavailable", 2)


def surges_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(strategy, "_keeps_draining", lambda live, revision, workers: False)


def forgets_templates_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "pin", lambda *given: revisions.pin(*given[:5]))


def writes_in_every_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(applier, "needs_apply", lambda desired, live, applied: desired["kind"] == "Deployment")


@pytest.mark.parametrize(
    ("fault", "told", "seed"),
    [
        (waits_for_ever, history, 18),
        (drains_at_once, history, 2),
        (ignores_departures, history, 12),
        (drains_two, history, 1),
        (surges_again, history, 12),
        (forgets_templates_in_use, taken_back, 4),
        (writes_in_every_pass, history, 1),
    ],
)
def test_a_planted_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], told: Callable[[int], None], seed: int) -> None:
    """Faulty operators must fail the histories above. Each seed is one of the first that finds its fault."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            told(seed)
