"""New images over a fleet: within its limits, from any point on after a kill, and never beyond a bad image.

The operator's own code on a simulated cluster (tests/operator/simulated).
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.simulated.fleet import Fleet

from fairlead_operator.observed import ObservedErrors
from fairlead_operator.settings import WaveLimits

ROLLOUT = {"engineVersion": "Auto", "progressDeadlineSeconds": 120, "drainTimeoutSeconds": 60}
GOOD, BAD = {"worker_image": "worker:2", "router_image": "control:2"}, {"worker_image": "worker:bad", "router_image": "control:2"}
BUSY = ("RollingOut", "Observing", "RollingBack")


class Limits:
    """Checks a fleet after each tick. `most` is the largest use that was seen."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.most = fleet, {"services": 0, "gpus": 0}
        self.wanted = {body["metadata"]["name"]: body["spec"].get("replicas", 1) for body in fleet.api.of("InferenceService")}

    def __call__(self) -> None:
        limits, updating, surge = self.fleet.settings.waves, 0, 0
        for name, replicas in self.wanted.items():
            is_counted = self.fleet.update(name).get("phase") in BUSY
            updating += is_counted
            if not self.fleet.is_busy(name):
                continue  # as at the last check
            pods = self.fleet.pods(name)
            surge += sum(pod["sim"].gpus for pod in pods[replicas:])
            mixed = len(self.fleet.images(name)) > 1 or len(self.fleet.images(name, "router")) > 1
            updating += mixed and not is_counted
            assert self.fleet.serving(name) >= replicas - (replicas > 1), f"{name} serves with {self.fleet.serving(name)} of {replicas}"
        assert updating <= limits.max_services, f"{updating} services at once"
        assert limits.max_surge_gpus is None or surge <= limits.max_surge_gpus, f"{surge} surge GPUs at once"
        self.most = {"services": max(self.most["services"], updating), "gpus": max(self.most["gpus"], surge)}


def make_fleet(seed: int, services: int, limits: WaveLimits, **spec: Any) -> Fleet:
    """A fleet at rest with the images worker:1 and control:1: of all strategies, with one worker or several, some asleep."""
    chance = random.Random(seed)
    fleet = Fleet(chance, 8 * services, limits)
    specs = {}
    for number in range(services):
        replicas = chance.choice([0, 1, 1, 2, 3])
        strategy = chance.choice(["Auto", "Surge", "DrainFirst"]) if replicas > 1 else "Surge"
        gpus = chance.choice([1, 1, 2])
        specs[f"s{number:03}"] = {
            "replicas": replicas,
            "rollout": ROLLOUT | {"strategy": strategy},
            "resources": {"gpus": gpus},
            "engine": {"tensorParallel": gpus},
            "routing": {"replicas": 1},
        } | spec
    fleet.create_all(specs)
    fleet.run(600.0, until=lambda: is_at(fleet, "worker:1", "control:1"))
    assert is_at(fleet, "worker:1", "control:1"), fleet.phases()
    return fleet


def is_at(fleet: Fleet, worker: str, router: str) -> bool:
    names = [body["metadata"]["name"] for body in fleet.api.of("InferenceService")]
    wanted = {name: fleet.api.objects["InferenceService", name]["spec"].get("replicas", 1) for name in names}
    return (
        fleet.phases() == {"Current": len(names)}
        and all(len(fleet.pods(name)) == fleet.serving(name) == wanted[name] for name in names)
        and all(fleet.images(name) <= {worker} and fleet.images(name, "router") == {router} for name in names)
    )


def roll_with_kills(fleet: Fleet, check: Limits, images: dict[str, str], until: Callable[[], bool], every: int) -> None:
    """Roll `images` out, and kill the operator about once in `every` of its writes."""
    fleet.restart(**images)
    while not until():
        fleet.api.kill_at = len(fleet.api.writes) + fleet.chance.randrange(every // 2, 3 * every // 2)
        fleet.api.kill_before = fleet.chance.random() < 0.5
        kills = fleet.kills
        fleet.run(6000.0, until=lambda kills=kills: until() or fleet.kills > kills, check=check)
        assert fleet.kills > kills or until(), fleet.phases()
    fleet.api.kill_at = -1


def test_a_fleet_stops_at_a_bad_image_and_every_service_still_serves() -> None:
    fleet = make_fleet(1, 30, WaveLimits(max_services=12, max_surge_gpus=10, observation_seconds=4.0))
    check, names = Limits(fleet), sorted(key[1] for key in fleet.api.objects if key[0] == "InferenceService")

    def has_stopped() -> bool:
        return "Failed" in fleet.phases() and set(fleet.phases()) <= {"Failed", "Waiting", "Current"}

    roll_with_kills(fleet, check, BAD, has_stopped, every=40)
    phases, kills = fleet.phases(), fleet.kills
    assert phases["Waiting"] > 10 and phases["Failed"] <= 12, phases
    assert all(fleet.images(name) <= {"worker:1"} for name in names), "those that failed are back at the image that serves"
    failed, waiting = (next(name for name in names if fleet.update(name)["phase"] == phase) for phase in ("Failed", "Waiting"))
    assert fleet.images(failed, "router") == {"control:1"}, "their routers too"
    told, stopped = fleet.condition(failed, "UpToDate"), fleet.condition(waiting, "UpToDate")
    assert (told["status"], told["reason"]) == ("False", "UpdateFailed") and "worker" in told["message"]
    assert (stopped["status"], stopped["reason"]) == ("False", "RolloutStopped") and "outdated -A" in stopped["message"]
    fleet.run(120.0, check=check)
    written = len(fleet.api.writes)
    fleet.restart()
    fleet.run(120.0, check=check)
    assert fleet.api.writes[written:] == [] and has_stopped(), "and the next operator keeps it so"
    print(f"{phases}, {kills} kills, at most {check.most}")
    assert kills >= 1


def test_a_fleet_takes_new_images_within_the_limits_while_the_operator_is_killed() -> None:
    fleet = make_fleet(2, 40, WaveLimits(max_services=12, max_surge_gpus=10, observation_seconds=4.0))
    check, began, written = Limits(fleet), fleet.api.now, len(fleet.api.writes)
    roll_with_kills(fleet, check, GOOD, lambda: is_at(fleet, "worker:2", "control:2"), every=100)
    print(f"{len(fleet.api.writes) - written} writes, {fleet.kills} kills, at most {check.most}, {fleet.api.now - began:.0f} simulated s")
    assert fleet.kills >= 2
    assert check.most == {"services": 12, "gpus": 10}, "the limits are used, and never exceeded"


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("images", [GOOD, BAD])
def test_the_rollout_goes_on_after_a_kill_at_each_of_its_writes(images: dict[str, str], before: bool) -> None:
    """Each write of a small rollout is the last of one process, and the next process continues."""
    fleet = make_fleet(3, 5, WaveLimits(max_services=2, max_surge_gpus=2, observation_seconds=4.0))
    check = Limits(fleet)
    fleet.restart(**images)
    fleet.api.kill_before = before

    def over() -> bool:
        if images is GOOD:
            return is_at(fleet, "worker:2", "control:2")
        return set(fleet.phases()) <= {"Failed", "Waiting", "Current"} and "Failed" in fleet.phases()

    lost: tuple[int, int] = (-1, 0)
    while not over():
        # A write that is lost is tried again by the next process, and must then succeed.
        seen = fleet.kills
        fleet.api.kill_at = len(fleet.api.writes) + (1 if before and lost[1] % 2 else 0)
        fleet.run(3000.0, until=lambda seen=seen: over() or fleet.kills > seen, check=check)
        lost = (fleet.api.kill_at, lost[1] + 1)
        assert over() or fleet.kills > seen, fleet.phases()
    assert fleet.kills > 30
    fleet.api.kill_at = -1
    fleet.run(300.0, check=check)
    assert over()


def test_more_failed_requests_stop_the_rollout() -> None:
    fleet = make_fleet(4, 6, WaveLimits(max_services=1, observation_seconds=60.0), replicas=1)
    fleet.restart(**GOOD)
    fleet.run(600.0, until=lambda: "Observing" in fleet.phases())
    observed = next(name for name in (f"s{number:03}" for number in range(6)) if fleet.update(name)["phase"] == "Observing")
    fleet.errors["default", observed] = ObservedErrors(requests=400, errors=20, rate_before=0.0)
    fleet.edit(observed, routing={"holdTimeoutSeconds": 31})  # any reason to look at it
    fleet.run(300.0)
    assert fleet.update(observed)["phase"] == "Failed" and "5 % of 400 requests failed" in fleet.update(observed)["message"]
    assert fleet.images(observed) == {"worker:1"} and fleet.phases() == {"Failed": 1, "Waiting": 5}


def test_a_stopped_rollout_continues_when_the_failed_service_is_restarted_or_pinned() -> None:
    fleet = make_fleet(5, 3, WaveLimits(max_services=1, observation_seconds=0.0), replicas=1)
    names = ("s000", "s001", "s002")
    fleet.restart(**BAD)
    fleet.run(300.0)
    failed = next(name for name in names if fleet.update(name)["phase"] == "Failed")
    assert fleet.phases() == {"Failed": 1, "Waiting": 2}
    for edit in ({"restartedAt": "2026-01-01T00:00:00Z"}, {"engineVersion": "Pinned"}):
        fleet.edit(failed, rollout=edit)
        fleet.run(60.0, until=lambda: "RollingOut" in fleet.phases())
        assert fleet.phases().get("RollingOut") == 1, "the next one is tried"
        fleet.run(300.0, until=lambda: "Failed" in fleet.phases())
        failed = next(name for name in names if fleet.update(name)["phase"] == "Failed")
    fleet.run(60.0)
    assert fleet.phases() == {"Pinned": 1, "Failed": 1, "Waiting": 1}
    assert all(fleet.images(name) == {"worker:1"} for name in names)
    fleet.restart(**GOOD)
    fleet.run(600.0)
    assert fleet.phases() == {"Pinned": 1, "Current": 2}, "good images continue it too"
    assert sorted(image for name in names for image in fleet.images(name)) == ["worker:1", "worker:2", "worker:2"]
