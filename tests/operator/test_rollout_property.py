"""Whatever is edited, and whenever: the service converges, nothing oscillates, availability is kept, and what is taken back restarts nothing.

The operator's own code on a simulated cluster (tests/operator/simulated); each seed is one history.
"""

import random

import pytest
from tests.operator.simulated.cluster import SERVICE, WORKER, Cluster

QUIET = 300.0  # seconds in which nothing may be written any more
ROLLOUT = {"progressDeadline": "2m", "drainTimeout": "60s"}


def revision(number: int, *, broken: bool = False) -> dict[str, object]:
    return {"maxNumSeqs": number, "args": ["--broken"] if broken else []}


def act(cluster: Cluster, chance: random.Random) -> None:
    """Something that somebody does to a service, its children, its nodes or its operator."""
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


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_done_it_converges_and_availability_is_kept(seed: int) -> None:
    chance = random.Random(seed)
    cluster = Cluster(chance, [chance.randint(1, 3) for _ in range(2)])
    for _ in range(chance.randint(3, 12)):
        act(cluster, chance)
        cluster.run(chance.choice([0.0, 2.0, 10.0, 40.0, 120.0]))
    if SERVICE not in cluster.api.objects:
        cluster.create(replicas=2, rollout=ROLLOUT)
    wanted = chance.randint(0, 4)
    cluster.nodes.capacity[0] = max(0, wanted - sum(cluster.nodes.capacity[1:])) + chance.randint(0, 1)
    cluster.edit(replicas=wanted, engine=revision(chance.randint(1, 9)), rollout={"paused": False, "revision": None})
    strategy = chance.choice(["Auto", "Auto", "DrainFirst"])
    cluster.edit(rollout={"strategy": strategy})
    cluster.run(3000.0, until=lambda: cluster.complete)
    assert cluster.complete, (cluster.condition("Progressing"), cluster.condition("Ready"), cluster.flips[-4:])
    cluster.run(60.0)
    written, flips = len(cluster.api.writes), len(cluster.flips)
    cluster.restart_operator()
    cluster.run(QUIET)
    assert cluster.api.writes[written:] == [] and len(cluster.flips) == flips
    assert cluster.condition("Progressing")["reason"] == "Complete"
