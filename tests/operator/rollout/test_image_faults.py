"""Which faults send an update back: every fault reason of the operator's source is classified here."""

import ast
import importlib
import random
from pathlib import Path
from typing import Literal

import pytest
from tests.operator.simulated.fleet import Fleet

import fairlead_operator
from fairlead_operator.api.status import Condition
from fairlead_operator.causes import containers, creation, events, weights
from fairlead_operator.rollout.image_faults import OF_IMAGES, find_image_fault, find_obstacle
from fairlead_operator.settings import WaveLimits
from fairlead_operator.status import unsupported
from fairlead_operator.status.endpoint import gateway

SOURCE = Path(fairlead_operator.__file__).parent
OTHERS = {
    # nodes, devices and volumes
    *("FailedScheduling", "NodeLost", "NodeNotResponding", "StuckTerminating", "Evicted", "UnexpectedAdmissionError"),
    *("FailedMount", "FailedResourceClaimCreation", "FailedCreatePodSandBox", "NetworkNotReady", "NodeAffinity", "NodePorts", "OutOfcpu"),
    # the control plane, and the namespace's rules
    *("ControllerNotResponding", "SchedulerNotResponding", "QuotaExceeded", "PodSecurity", "LimitRange", "FailedCreate", "ApplyFailed"),
    "ReplicasConflict",
    # the model's store
    *("DiskFull", "ModelNotFound", "PrefetchFailed", "StoreForbidden", "StoreUnauthorized", "StoreUnreachable"),
    *("HubForbidden", "HubUnauthorized", "HubRateLimited", "HubUnreachable"),
    # what surrounds the service
    *("IndexUnavailable", "GatewayApiMissing", "InferencePoolMissing", "GatewayNotFound", "CertManagerMissing", "CertificateNotIssued"),
    "OtherServiceUnusable",
    # workers that serve, but slower
    "WorkerFallback",
    # the spec
    *("RevisionNotFound", "InvalidSpec", "ProfileNotFound", "TensorParallelUnsupported", "LeaderWorkerSetMissing"),
}
COMPUTED = {  # (module, expression) of a reason that is no literal → its values
    ("causes.containers", "reason"): containers.IMAGE | containers.CONTAINER,
    ("causes.creation", "reason"): {"FailedCreate"},
    ("causes.events", "event.reason"): {*events.DEVICE_CLAIM, "FailedCreatePodSandBox", "NetworkNotReady"},
    ("causes.pods", "reason"): {"Evicted", "UnexpectedAdmissionError", "NodeAffinity", "NodePorts", "OutOfcpu"},
    ("causes.unresponsive", "reason"): {"SchedulerNotResponding", "NodeNotResponding"},
    ("causes.weights", "reason"): {reason for _, reason, _ in weights._KINDS},
    ("reconcile.reconciler", "reason"): {"ProfileNotFound", "InvalidSpec"},
    ("reconcile.reconciler", "*problem"): {unsupported.REASON, unsupported.MISSING},
    ("rollout.canary", "cause.reason"): set(),  # of the canary's pod
    ("status.capacity", "reason"): {"CapacityReduced", "ProgressDeadlineExceeded"},
    ("status.endpoint.gateway", "verdict[1]"): {reason for reason, _ in gateway._MISSING.values()}
    | {"GatewayNotFound"},  # else a gateway's own
}


def find_reasons() -> set[str]:
    """Read the reasons of all faults from the calls of Cause and make_cause."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("Cause", "make_cause"):
                found |= read_call(module, call)
    return found


def read_call(module: str, call: ast.Call) -> set[str]:
    faults = [one.value for one in call.keywords if one.arg == "fault"] + (call.args[2:3] if ast.unparse(call.func) == "Cause" else [])
    if module == "causes.cause" or any(isinstance(one, ast.Constant) and one.value is False for one in faults):
        return set()
    words = ast.unparse(call.args[0])
    if (module, words) in COMPUTED:
        return set(COMPUTED[module, words])
    if isinstance(call.args[0], ast.Name):
        return {str(getattr(importlib.import_module(f"fairlead_operator.{module}"), words))}
    return {node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant) and node.value != "CrashLoopBackOff"} | (
        {"CrashLoopBackOff"} if "CrashLoopBackOff" in words else set()
    )


def make_condition(type_: str, status: Literal["True", "False"], reason: str) -> Condition:
    return Condition(type=type_, status=status, last_transition_time="2026-01-01T00:00:00Z", reason=reason, message="x")


def test_every_fault_of_the_source_is_classified() -> None:
    found = find_reasons()
    assert len(found) > 50
    assert found - OF_IMAGES - OTHERS == set(), "does an image cause it? Then it belongs into OF_IMAGES, else into OTHERS"
    assert not OTHERS & OF_IMAGES and not OTHERS - found
    assert OF_IMAGES - found == set(), "the operator writes no such reason"
    assert creation.PAUSED not in found, "not a fault"


@pytest.mark.parametrize("reason", sorted(OTHERS | {"ListenersNotValid"}))
def test_a_fault_that_no_image_causes_is_not_judged(reason: str) -> None:
    degraded = make_condition("Degraded", "True", reason)
    assert not find_image_fault(degraded, None)
    late = make_condition("Progressing", "False", "ProgressDeadlineExceeded")
    assert find_image_fault(degraded, late) == "ProgressDeadlineExceeded: x"


DENIED = "deployments.apps \"x\" is forbidden: ValidatingAdmissionPolicy 'images' with binding 'images' denied request: cannot be used"


@pytest.mark.parametrize(("words", "reason"), [(DENIED, "AdmissionDenied"), ("the server is in read-only mode", "ApplyFailed")])
def test_images_with_which_no_deployment_can_be_written_give_their_place_back(words: str, reason: str) -> None:
    """No pod is of the new images, so no Deployment ever reports a deadline."""
    fleet = Fleet(random.Random(8), 8, WaveLimits(max_services=1, observation_seconds=0.0))
    rollout = {"engineVersion": "Auto", "progressDeadlineSeconds": 600}
    fleet.create_all({name: {"replicas": 1, "rollout": rollout, "routing": {"replicas": 1}} for name in ("a", "b")})
    fleet.run(200.0)
    fleet.api.refuse = lambda body: words if body["kind"] == "Deployment" and "control:2" in str(body) else ""
    fleet.restart(router_image="control:2")
    fleet.run(60.0)
    begun = fleet.phases()
    assert begun == ({"Failed": 1, "Waiting": 1} if reason == "AdmissionDenied" else {"RollingOut": 1, "Waiting": 1})
    fleet.run(900.0)
    failed = next(name for name in ("a", "b") if fleet.update(name)["phase"] == "Failed")
    assert reason in fleet.update(failed)["message"] and fleet.phases() == {"Failed": 1, "Waiting": 1}
    assert all(fleet.images(name, "router") == {"control:1"} and fleet.serving(name) == 1 for name in ("a", "b"))


def test_one_refused_request_late_in_an_update_does_not_send_it_back() -> None:
    fleet = Fleet(random.Random(8), 8, WaveLimits(max_services=1, observation_seconds=0.0))
    rollout = {"engineVersion": "Auto", "progressDeadlineSeconds": 600, "strategy": "Surge"}
    fleet.create_all({"a": {"replicas": 2, "rollout": rollout, "routing": {"replicas": 1}}})
    fleet.run(200.0)
    fleet.restart(worker_image="worker:2", router_image="control:2")
    fleet.run(60.0, until=lambda: fleet.update("a").get("phase") == "RollingOut")
    fleet.edit("a", rollout=rollout | {"paused": True})
    fleet.run(1000.0)
    assert fleet.update("a")["phase"] == "RollingOut" and fleet.update("a")["held"]
    fleet.api.refuse = lambda body: "the server is in read-only mode" if body["kind"] == "Deployment" else ""
    fleet.edit("a", rollout=rollout | {"paused": False})
    fleet.run(60.0)
    assert fleet.update("a")["phase"] == "RollingOut"
    fleet.api.refuse = lambda body: ""
    fleet.run(300.0)
    assert fleet.phases() == {"Current": 1} and fleet.images("a", "router") == {"control:2"}


def test_an_update_waits_out_a_fault_that_no_image_causes_and_says_so() -> None:
    fleet = Fleet(random.Random(7), 8, WaveLimits(max_services=1, observation_seconds=0.0))
    rollout = {"engineVersion": "Auto", "strategy": "Surge", "progressDeadlineSeconds": 600}
    fleet.create_all({name: {"replicas": 1, "rollout": rollout, "routing": {"replicas": 1}} for name in ("a", "b")})
    fleet.run(200.0)
    fleet.restart(worker_image="worker:2", router_image="control:2")
    fleet.run(300.0, until=lambda: fleet.phases().get("RollingOut") == 1)
    name = next(one for one in ("a", "b") if fleet.update(one)["phase"] == "RollingOut")
    fleet.edit(name, exposure={"otherServices": ["missing"]})
    fleet.run(4.0)
    update = fleet.update(name)
    assert update["phase"] == "RollingOut" and "held up by a fault that no image causes. OtherServiceUnusable" in update["message"]
    fleet.run(600.0)
    assert fleet.phases() == {"Current": 2}, "it does not stop the rollout"
    assert find_obstacle(make_condition("Degraded", "True", "OtherServiceUnusable"))
