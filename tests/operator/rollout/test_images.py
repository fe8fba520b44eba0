"""Which images a service gets, over edits and changes of engineVersion: on a simulated cluster of one service."""

import random
from typing import Any

import pytest
from tests.operator.simulated.fleet import Fleet
from tests.operator.support.manifests import service

from fairlead_operator.revisions import router_revision, worker_revision
from fairlead_operator.settings import WaveLimits

CANARY = {"trafficPercent": 10, "promotion": "Manual"}
NEW = {"worker_image": "worker:2", "router_image": "control:2"}


def begin(limits: WaveLimits | None = None, gpus: int = 8, **spec: Any) -> Fleet:
    """One service at rest at worker:1 and control:1."""
    fleet = Fleet(random.Random(7), gpus, limits or WaveLimits(observation_seconds=0.0))
    fleet.create_all({"qwen": {"replicas": 2, **spec}})
    fleet.run(200.0)
    assert running(fleet) == ({"worker:1"}, {"control:1"}) and fleet.serving("qwen") == 2
    return fleet


def running(fleet: Fleet) -> tuple[set[str], set[str]]:
    return fleet.images("qwen"), fleet.images("qwen", "router")


def revisions(fleet: Fleet) -> list[tuple[str, str, int, int]]:
    listed = fleet.status("qwen")["revisions"]
    return [(one["component"], one["image"], one["replicas"], one["readyReplicas"]) for one in listed]


def test_a_pinned_service_takes_newer_images_with_its_next_edit_or_restart_only() -> None:
    fleet = begin()
    fleet.restart(**NEW)
    fleet.run(100.0)
    assert running(fleet) == ({"worker:1"}, {"control:1"}) and fleet.update("qwen")["phase"] == "Pinned"
    fleet.edit("qwen", rollout={"restartedAt": "2026-01-01T00:00:00Z"})
    fleet.run(300.0)
    assert running(fleet) == ({"worker:2"}, {"control:1"}), "the workers were restarted, and only they"
    assert revisions(fleet) == [("worker", "worker:2", 2, 2), ("router", "control:1", 2, 2)]


def test_switching_between_pinned_and_auto_restarts_nothing() -> None:
    fleet = begin()
    fleet.run(60.0)
    before = {pod["metadata"]["uid"] for pod in fleet.api.of("Pod")}
    for version in ("Auto", "Pinned"):
        fleet.edit("qwen", rollout={"engineVersion": version})
        fleet.run(100.0)
        assert {pod["metadata"]["uid"] for pod in fleet.api.of("Pod")} == before
    fleet.edit("qwen", rollout={"engineVersion": "Auto"})
    fleet.restart(**NEW)
    fleet.run(400.0)
    assert running(fleet) == ({"worker:2"}, {"control:2"}) and fleet.update("qwen")["phase"] == "Current"
    before = {pod["metadata"]["uid"] for pod in fleet.api.of("Pod")}
    fleet.edit("qwen", rollout={"engineVersion": "Pinned"})
    fleet.run(100.0)
    fleet.restart(worker_image="worker:3", router_image="control:3")
    fleet.run(100.0)
    assert {pod["metadata"]["uid"] for pod in fleet.api.of("Pod")} == before, "it stays at the images that it has now"


def test_an_edit_while_the_rollout_is_paused_keeps_the_images_of_the_pods() -> None:
    fleet = begin(WaveLimits(paused=True), rollout={"engineVersion": "Auto"})
    fleet.restart(**NEW)
    fleet.run(60.0)
    assert fleet.condition("qwen", "UpToDate")["message"] == "the chart's rollout.paused holds all updates back"
    fleet.edit("qwen", engine={"maxNumSeqs": 9})
    fleet.run(300.0)
    args = fleet.pods("qwen")[0]["sim"].set.template["spec"]["containers"][0]["args"]
    assert running(fleet) == ({"worker:1"}, {"control:1"}) and "--max-num-seqs=9" in args
    fleet.edit("qwen", engine={"maxNumSeqs": 256})
    before = {pod["metadata"]["uid"] for pod in fleet.api.of("Pod")}
    fleet.restart(waves=WaveLimits(observation_seconds=0.0))
    fleet.run(600.0)
    assert running(fleet) == ({"worker:2"}, {"control:2"}) and before.isdisjoint(pod["metadata"]["uid"] for pod in fleet.api.of("Pod"))


def test_an_image_of_the_user_is_not_replaced_and_the_other_part_is_updated() -> None:
    fleet = begin(rollout={"engineVersion": "Auto"})
    fleet.edit("qwen", engine={"image": "mine:1"})
    fleet.run(300.0)
    assert running(fleet) == ({"mine:1"}, {"control:1"}) and fleet.update("qwen")["phase"] == "Current"
    fleet.restart(**NEW)
    fleet.run(400.0)
    assert running(fleet) == ({"mine:1"}, {"control:2"}) and fleet.update("qwen")["phase"] == "Current"
    fleet.edit("qwen", routing={"image": "mine:2"})
    fleet.run(300.0)
    assert running(fleet) == ({"mine:1"}, {"mine:2"})


def test_without_gpus_for_a_surge_strategy_auto_drains_and_surge_waits_with_the_remedy() -> None:
    limits = WaveLimits(max_surge_gpus=0, observation_seconds=0.0)
    fleet = begin(limits, rollout={"engineVersion": "Auto"})
    fleet.restart(**NEW)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, len(fleet.pods("qwen")))

    fleet.run(600.0, check=look)
    assert running(fleet) == ({"worker:2"}, {"control:2"}) and most == 2, "one worker less, never one more"
    assert fleet.update("qwen")["phase"] == "Current"
    fleet.edit("qwen", rollout={"strategy": "Surge"})
    fleet.restart(worker_image="worker:3")
    fleet.run(100.0)
    assert fleet.update("qwen")["phase"] == "Waiting" and "raise the chart's rollout.maxSurgeGPUs" in fleet.update("qwen")["message"]


def test_a_held_service_is_updated_after_it_is_released() -> None:
    fleet = begin(rollout={"engineVersion": "Auto"})
    fleet.edit("qwen", rollout={"paused": True})
    fleet.restart(**NEW)
    fleet.run(100.0)
    assert fleet.update("qwen")["phase"] == "Held" and "spec.rollout.paused" in fleet.condition("qwen", "UpToDate")["message"]
    fleet.edit("qwen", rollout={"paused": False})
    fleet.run(400.0)
    assert running(fleet) == ({"worker:2"}, {"control:2"})


@pytest.mark.parametrize("strategy", ["Surge", "DrainFirst"])
@pytest.mark.parametrize("field", ["paused", "revision"])
def test_an_update_that_its_spec_holds_up_says_so_frees_its_place_and_goes_on_after_it(field: str, strategy: str) -> None:
    fleet = Fleet(random.Random(7), 8, WaveLimits(max_services=1, max_surge_gpus=1, observation_seconds=0.0))
    fleet.create_all({name: {"replicas": 2, "rollout": {"engineVersion": "Auto", "strategy": strategy}} for name in ("a", "b")})
    fleet.run(200.0)
    stored = next(one["metadata"]["name"] for one in fleet.api.of("ControllerRevision") if one["metadata"]["name"].startswith("a-worker"))
    fleet.restart(**NEW)
    fleet.run(100.0, until=lambda: fleet.update("a").get("phase") == "RollingOut")
    fleet.edit("a", rollout={field: True if field == "paused" else stored.replace("-worker", "")})
    fleet.run(600.0, until=lambda: fleet.update("b").get("phase") == "Current")
    held, condition = fleet.update("a"), fleet.condition("a", "UpToDate")
    assert held["phase"] == "RollingOut" and held["message"] == f"spec.rollout.{field} holds the update back: remove it"
    assert condition["reason"] == "RollingOut" and condition["message"] == held["message"]
    assert fleet.update("b")["phase"] == "Current", "its place was free"
    fleet.edit("a", rollout={field: False if field == "paused" else None})
    fleet.run(600.0, until=lambda: fleet.phases() == {"Current": 2})
    assert fleet.phases() == {"Current": 2} and fleet.images("a") == {"worker:2"} and not fleet.update("a").get("message")


def use_mirror(body: dict[str, Any]) -> None:
    """Rewrite images as a policy with a pull-through cache does."""
    if body["kind"] == "Deployment":
        for container in body["spec"]["template"]["spec"]["containers"]:
            container["image"] = f"mirror/{container['image'].removeprefix('mirror/')}"


def test_services_whose_images_a_policy_rewrites_are_updated_and_none_keeps_its_place() -> None:
    fleet = Fleet(random.Random(7), 8, WaveLimits(max_services=1, observation_seconds=0.0))
    fleet.api.mutate = use_mirror
    auto = {"replicas": 1, "rollout": {"engineVersion": "Auto"}}
    fleet.create_all({"a": auto, "b": auto, "pinned": {"replicas": 1}})
    fleet.run(200.0)
    assert fleet.phases() == {"Current": 3}
    fleet.restart(**NEW)
    fleet.run(900.0, until=lambda: fleet.phases() == {"Current": 2, "Pinned": 1})
    assert fleet.phases() == {"Current": 2, "Pinned": 1}
    assert fleet.images("a") == fleet.images("b") == {"mirror/worker:2"} and fleet.images("pinned") == {"mirror/worker:1"}
    before = {pod["metadata"]["uid"] for pod in fleet.api.of("Pod")}
    fleet.restart(worker_image="worker:1", router_image="control:1")
    fleet.run(900.0, until=lambda: fleet.phases() == {"Current": 3})
    kept = {pod["metadata"]["uid"] for pod in fleet.pods("pinned")}
    assert fleet.phases() == {"Current": 3} and kept <= before and fleet.update("pinned")["previousWorkerImage"] == ""


def test_a_router_image_of_the_pod_template_is_the_users() -> None:
    template = {"spec": {"containers": [{"name": "router", "image": "mine:1"}]}}
    fleet = Fleet(random.Random(7), 8, WaveLimits(max_services=1, observation_seconds=0.0))
    fleet.create_all({"a": {"replicas": 1, "rollout": {"engineVersion": "Auto"}, "router": {"podTemplate": template}}})
    fleet.run(200.0)
    assert fleet.update("a")["phase"] == "Current"
    fleet.restart(**NEW)
    fleet.run(900.0, until=lambda: fleet.update("a")["phase"] == "Current" and fleet.images("a") == {"worker:2"})
    assert fleet.update("a")["phase"] == "Current" and fleet.images("a", "router") == {"mine:1"}


def test_an_update_whose_canary_waits_for_its_promotion_gives_its_place_to_others_after_the_deadline() -> None:
    fleet = Fleet(random.Random(7), 8, WaveLimits(max_services=1, observation_seconds=0.0))
    rollout = {"engineVersion": "Auto", "progressDeadlineSeconds": 300}
    canary = {"a": {**CANARY, "replicas": 1}, "b": None}
    fleet.create_all(
        {name: {"replicas": 1, "rollout": {**rollout, "canary": canary[name]} if canary[name] else rollout} for name in canary}
    )
    fleet.run(200.0)
    fleet.restart(**NEW)
    fleet.run(900.0, until=lambda: fleet.update("b").get("phase") == "Current" and fleet.images("b") == {"worker:2"})
    assert fleet.update("b")["phase"] == "Current" and fleet.images("b") == {"worker:2"}
    held = fleet.update("a")
    assert held["phase"] == "RollingOut" and held["held"] and "promotedRevision" in held["message"]


def test_a_held_update_counts_the_gpu_of_a_surge_worker_that_comes_later() -> None:
    """The update is held as soon as it begins, and then the user rolls the service to an earlier revision."""
    fleet = Fleet(random.Random(7), 8, WaveLimits(max_surge_gpus=1, observation_seconds=0.0))
    rollout = {"engineVersion": "Auto", "strategy": "Surge"}
    fleet.create_all({"a": {"replicas": 2, "rollout": rollout, "engine": {"maxNumSeqs": 32}}})
    fleet.run(200.0)
    earlier = fleet.status("a")["revision"]
    fleet.edit("a", engine={"maxNumSeqs": 48})
    fleet.run(200.0)
    fleet.restart(**NEW)
    fleet.run(100.0, until=lambda: fleet.update("a").get("phase") == "RollingOut")
    fleet.edit("a", rollout={"paused": True})
    fleet.run(60.0, until=lambda: fleet.update("a").get("held"))
    assert fleet.update("a")["held"]
    counted: set[tuple[int, int]] = set()
    fleet.edit("a", rollout={"paused": False, "revision": earlier})
    fleet.run(400.0, check=lambda: counted.add((len(fleet.pods("a")), fleet.update("a").get("surgeGPUs", 0))))
    assert (3, 1) in counted, counted
    assert fleet.update("a")["held"] and fleet.update("a")["surgeGPUs"] == 0, "it is given back with the worker"


def test_what_shapes_a_revision_and_what_does_not() -> None:
    plain, auto = service(), service(rollout={"engineVersion": "Auto"})
    restarted = service(rollout={"restartedAt": "2026-01-01T00:00:00Z"})
    assert (worker_revision(auto), router_revision(auto)) == (worker_revision(plain), router_revision(plain))
    assert worker_revision(restarted) != worker_revision(plain) and router_revision(restarted) == router_revision(plain)
    assert router_revision(service(routing={"image": "x:1"})) != router_revision(plain)
