"""New images of the operator in a service with canaries: forward by a canary, and back without one."""

import random
from typing import Any, cast

import pytest
from tests.operator.rollout.test_canary import ASKED, CANARY, Trial
from tests.operator.simulated.cluster import SERVICE, WORKER

from fairlead_operator.observed import FleetView, ObservedErrors
from fairlead_operator.reconcile.fleet import FleetRollout
from fairlead_operator.rollout.images import image_of
from fairlead_operator.settings import WaveLimits


class Admitting:
    """A planner for one service, which always has a place."""

    def view(self, owner: object) -> FleetView:
        return FleetView(True, "")

    def report(self, owner: object, status: object) -> None:
        pass


class Update(Trial):
    """A service of the fleet, at rest with worker:1. Only workers get another image."""

    def __init__(self, promotion: str) -> None:
        self.asked = ASKED | {"promotion": promotion, "trafficPercent": 10, "analysisSeconds": 300}
        super().__init__(random.Random(1), self.asked, rollout={"engineVersion": "Auto", "canary": self.asked})
        self.settle()
        self.restart_operator(waves=WaveLimits(observation_seconds=600.0), worker_image="worker:2")
        self.operator._fleet = cast(FleetRollout, Admitting())

    @property
    def update(self) -> dict[str, Any]:
        return dict(self.api.objects[SERVICE]["status"]["imageUpdate"])

    @property
    def image(self) -> str:
        return image_of(self.api.objects[WORKER]["spec"]["template"], "worker")

    def until_update(self, phase: str, seconds: float) -> None:
        self.run(seconds, until=lambda: self.update["phase"] == phase)
        assert self.update["phase"] == phase, self.update


@pytest.mark.parametrize("promotion", ["Automatic", "Manual"])
def test_a_bad_image_goes_forward_as_a_canary_and_back_at_once(promotion: str) -> None:
    service = Update(promotion)
    routers = service.api.objects["Deployment", "qwen-router"]["spec"]["template"]
    if promotion == "Manual":
        service.until("Paused")
        service.run(10.0)
        named = service.api.objects[SERVICE]["status"]["canary"]["revision"]
        words = f"the update waits for the promotion of its canary: set spec.rollout.canary.promotedRevision to {named}"
        assert service.update["phase"] == "RollingOut" and service.update["message"] == words
        assert service.condition("UpToDate")["message"] == words
        service.edit(rollout={"canary": service.asked | {"promotedRevision": named}})
    service.until_update("Observing", 900.0)
    service.settle()
    assert service.image == "worker:2" and service.update["message"] == ""

    service.operator.errors = lambda: ObservedErrors(400, 40, 0.0)
    service.operator.wake()
    service.until_update("RollingBack", 20.0)
    canaries = []
    service.api.clients.append(lambda event, body: canaries.append(event) if body["metadata"]["name"] == CANARY[1] else None)
    service.run(20.0)
    assert service.image == "worker:1", "the bad image does not keep its share of the requests"
    service.until_update("Failed", 250.0)
    assert canaries == [] and service.api.objects["Deployment", "qwen-router"]["spec"]["template"] == routers

    service.operator.errors = ObservedErrors
    service.edit(engine={"maxNumSeqs": 2})
    service.run(60.0, until=lambda: CANARY in service.api.objects)
    assert CANARY in service.api.objects and service.image == "worker:1", "an edit by the user is a canary again"


def test_a_canary_of_a_bad_image_ends_when_the_update_fails_before_its_promotion() -> None:
    service = Update("Manual")
    service.error_rate = 0.5
    service.until_update("Failed", 900.0)
    service.run(20.0)
    assert service.image == "worker:1" and CANARY not in service.api.objects and "CanaryFailed" in service.update["message"]
