"""Each reason of a service: taken from the state of its pods and Deployments, with Kubernetes' own message and what to do next.

Every reason has a case; `on_apiserver/causes` has more of them, with the words of a real worker, scheduler and API server.
"""

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.support.manifests import container, pod

from fairlead_operator import causes
from fairlead_operator.causes import creation
from fairlead_operator.causes.cause import LONGEST, make_cause
from fairlead_operator.observed import PodEvent


def unscheduled(message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containerStatuses": [container({"waiting": {"reason": reason, "message": message}})]}


def ended(message: str = "", code: int = 1, reason: str = "Error", **more: Any) -> dict[str, Any]:
    return {"containerStatuses": [container({"terminated": {"exitCode": code, "reason": reason, "message": message}}, **more)]}


def hub(cause: str) -> dict[str, Any]:
    """The worker's termination message, in the form of `ModelLoadError`."""
    return ended(f"Traceback:\n  …\nfairlead-worker: cannot load model hf://org/m: {cause}")


GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No preemption victims found."
CREATING = waiting("ContainerCreating")
RUNNING = {"containerStatuses": [container({"running": {}}, started=True)]}

# name of the case, the scheduler's message, words that must be there
UNSCHEDULED = [
    ("no GPU", GPU, r"short of nvidia\.com/gpu on 3 of 3 nodes.*set spec\.resources\.gpus: 0"),
    (
        "no MIG slice",
        "0/3 nodes are available: 3 Insufficient nvidia.com/mig-1g.10gb.",
        r"Add a node with nvidia\.com/mig-1g\.10gb.*correct spec\.resources\.gpuResource",
    ),
    ("no AMD GPU", "0/3 nodes are available: 3 Insufficient amd.com/gpu.", "Free a GPU"),
    (
        "no DRA device",
        "0/3 nodes are available: 3 cannot allocate all claims.",
        "ResourceClaimTemplate selects.*kubectl get resourceslices",
    ),
    ("taint", "0/1 nodes are available: 1 node(s) had untolerated taint {gpu: yes}.", "Tolerate gpu: yes"),
    (
        "volume on another node",
        "0/9 nodes are available: 7 Too many pods, 1 Insufficient cpu, 1 node(s) didn't match PersistentVolume's node affinity.",
        "The claim's volume is on another node.*Lower spec.resources.cpu",
    ),
    ("no node", "no nodes available to schedule pods", "add one"),
]
# name, the container's waiting reason, its message, reason, words
WAITING = [
    ("pull, 404", "ErrImagePull", "manifest unknown", "ImagePullBackOff", "worker:1: manifest unknown.*Correct the image"),
    ("pull, again", "ImagePullBackOff", 'Back-off pulling "a": ErrImagePull: not found', "ImagePullBackOff", "worker:1: not found"),
    ("image name", "InvalidImageName", "couldn't parse image name", "InvalidImageName", "in lower case"),
    ("never pull", "ErrImageNeverPull", "not present", "ErrImageNeverPull", "imagePullPolicy"),
    ("no Secret", "CreateContainerConfigError", 'secret "hub" not found', "CreateContainerConfigError", "Create the Secret hub"),
    (
        "no key",
        "CreateContainerConfigError",
        "couldn't find key token in Secret ns/hub",
        "CreateContainerConfigError",
        "Put the key token into the Secret hub",
    ),
    ("driver", "RunContainerError", "nvidia-container-cli: initialization error", "RunContainerError", "GPU operator"),
]
# name, why a worker cannot load its model, reason, words
FAILED_LOADS = [
    ("hub 401", "no such repository, or it is private and HF_TOKEN does not open it (401)", "HubUnauthorized", r"spec\.model\.secretRef"),
    ("hub 403", "the repository is gated (403): accept its terms on the hub and set HF_TOKEN", "HubForbidden", "Accept the model's terms"),
    ("hub revision", "the repository has no revision 'x' (404)", "ModelNotFound", "revision"),
    ("hub 429", "the hub answered 429: slow down", "HubRateLimited", r"spec\.model\.cache"),
    ("hub 503", "the hub answered 503: away", "HubUnreachable", "retries automatically"),
    ("hub away", "the hub cannot be reached and the files are not cached here (x)", "HubUnreachable", "NetworkPolicy"),
    ("disk full", "download failed: [Errno 28] No space left on device", "DiskFull", "larger volume"),
    ("GGUF cut off", "m.gguf: tensor t ends: the file is damaged or incomplete, fetch or convert it again", "WeightsInvalid", "again"),
    ("GGUF type", "m.gguf: tensor t has type Q2_K, which is not supported: quantize the model as F32", "ModelUnsupported", "supported"),
    ("GGUF models", "there are 2 GGUF models in /mnt/model, such as a.gguf, b.gguf: name one", "ModelNotFound", r"\.gguf file"),
    ("store 403", "the store refuses access (403): the key may not read it", "StoreForbidden", "read that bucket"),
    ("store 401", "the store asks for credentials (401): give them", "StoreUnauthorized", "AWS_ACCESS_KEY_ID"),
    ("store away", "the bucket cannot be reached: see spec.model.endpoint", "StoreUnreachable", "DNS"),
    ("no bucket", "there is no such bucket (404): see spec.model.uri", "ModelNotFound", "Correct the bucket"),
    ("cache full", "/var/cache/fairlead is full (0.1 GiB free): enlarge it", "DiskFull", "larger volume"),
    ("cache empty", "it is not in /c, which cannot be written: make spec.model.cache writable", "CacheNotWritable", "fsGroup"),
    ("other model fault", "something else", "ModelLoadFailed", "kubectl logs"),
]
TABLE: list[tuple[str, dict[str, Any], tuple[str, str] | None, str, str]] = [
    # name of the case → status of the pod, an Event of it, reason, words that must be there
    *((name, unscheduled(message), None, "FailedScheduling", words) for name, message, words in UNSCHEDULED),
    *((name, waiting(why, message), None, reason, words) for name, why, message, reason, words in WAITING),
    *((name, hub(message), None, reason, words) for name, message, reason, words in FAILED_LOADS),
    (
        "no DRA template",
        {"phase": "Pending"},
        ("FailedResourceClaimCreation", 'PodResourceClaim gpu: resource claim template "h100": not found'),
        "FailedResourceClaimCreation",
        "h100.*Create the ResourceClaimTemplate that spec.resources.resourceClaims names",
    ),
    ("gated", unscheduled("waits for Kueue", "SchedulingGated"), None, "SchedulingGated", "waits for its scheduling gates"),
    ("GPU memory", ended("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), None, "GpuOutOfMemory", "tensorParallel"),
    (
        "adapter",
        ended("cannot load LoRA adapter sql from file:///m: no adapter_config.json in /m"),
        None,
        "AdapterLoadFailed",
        r"Correct spec\.model\.adapters",
    ),
    ("killed for memory", ended(code=137, reason="OOMKilled"), None, "OOMKilled", r"Raise spec\.resources\.memory"),
    ("crash", ended("ValueError: x"), None, "Crashed", "exited with code 1: ValueError: x.*--previous"),
    ("crash loop", ended("ValueError: x", restartCount=3), None, "CrashLoopBackOff", "ValueError: x"),
    (
        "killed by a probe",
        ended(code=137, restartCount=1),
        ("Unhealthy", "Liveness probe failed: timeout"),
        "ProbeFailed",
        "Liveness probe failed",
    ),
    ("killed for an unknown reason", ended(code=137, restartCount=1), None, "Crashed", "code 137"),
    ("not ready", RUNNING, ("Unhealthy", "Readiness probe failed: HTTP 503"), "NotReady", "Readiness probe failed: HTTP 503"),
    (
        "not ready after a crash",
        {"containerStatuses": [container({"running": {}}, {"terminated": {"exitCode": 1, "message": "x"}}, started=True)]},
        None,
        "NotReady",
        "draining",
    ),
    (
        "no claim to mount",
        CREATING,
        ("FailedMount", 'persistentvolumeclaim "weights" not found'),
        "FailedMount",
        "Create the PersistentVolumeClaim weights",
    ),
    ("attached elsewhere", CREATING, ("FailedAttachVolume", "Multi-Attach error for volume"), "FailedMount", "ReadWriteMany"),
    (
        "no status at all",
        {"conditions": [{"type": "PodScheduled", "status": "True"}]},
        ("FailedMount", "x"),
        "FailedMount",
        "kubectl describe pod",
    ),
    ("network", CREATING, ("FailedCreatePodSandBox", "plugin type=calico failed"), "FailedCreatePodSandBox", "network plugin"),
    ("node not ready", CREATING, ("NodeNotReady", "Node is not ready"), "NodeLost", "kubectl delete node"),
    ("node lost", {"reason": "NodeLost", "conditions": [{"type": "Ready", "status": "Unknown"}]}, None, "NodeLost", "5 minutes"),
    (
        "node unheard",
        {"containerStatuses": [container({"running": {}}, started=True, ready=True)], "conditions": [{"type": "Ready", "status": "False"}]},
        None,
        "NodeLost",
        "does not answer",
    ),
    (
        "evicted",
        {"phase": "Failed", "reason": "Evicted", "message": "low on resource: ephemeral-storage."},
        None,
        "Evicted",
        "ephemeral-storage.*spec.resources",
    ),
    (
        "rejected by its node",
        {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPU"},
        None,
        "UnexpectedAdmissionError",
        "device plugin",
    ),
    (
        "disrupted",
        {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempting"}]},
        None,
        "Disrupted",
        "preempting",
    ),
    ("loading", {"containerStatuses": [container({"running": {}}, started=False)]}, None, "Loading", "loading the model"),
    (
        "another container runs",
        {"containerStatuses": [container({"running": {}}, name="router", started=False)]},
        None,
        "Starting",
        "container router is not ready yet",
    ),
    (
        "a sidecar that is not ready",
        {"initContainerStatuses": [container({"running": {}}, started=False) | {"name": "istio-proxy"}]},
        None,
        "Starting",
        "container istio-proxy is not ready yet",
    ),
    (
        "a worker beside a sidecar",
        {
            "initContainerStatuses": [container({"running": {}}) | {"name": "istio-proxy", "ready": True, "started": True}],
            "containerStatuses": [container({"running": {}}, started=False)],
        },
        None,
        "Loading",
        "loading the model",
    ),
    ("creating", CREATING, None, "Starting", "is starting"),
]


@pytest.mark.parametrize(("status", "event", "reason", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_cause_of_a_pod_names_reason_and_remedy(status: dict[str, Any], event: tuple[str, str] | None, reason: str, words: str) -> None:
    cause = causes.find_pod_cause(pod(**status), PodEvent(*event) if event else None)
    assert cause is not None and cause.reason == reason and re.search(words, cause.message), cause
    assert len(cause.message) <= LONGEST and "qwen-worker-1" in cause.message
    if cause.fault:
        assert cause.message.endswith("."), "advice is a sentence"


def test_a_missing_model_is_one_reason_from_the_first_crash_on() -> None:
    words = "cannot load model hf://org/m: the repository is gated (403): accept its terms"
    last = {"terminated": {"exitCode": 1, "message": words}}
    states = [ended(words), ended(words, restartCount=5), waiting("CrashLoopBackOff")]
    states[2]["containerStatuses"][0]["lastState"] = last
    states.append({"containerStatuses": [container({"running": {}}, last, restartCount=2, started=False)]})
    assert len({causes.find_pod_cause(pod(**state)) for state in states}) == 1


@pytest.mark.parametrize(
    ("message", "reason", "words", "template"),
    [
        ('pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1', "QuotaExceeded", "ResourceQuota gpus", False),
        (
            'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged',
            "PodSecurity",
            "privileged.*Remove the named settings",
            True,
        ),
        ('admission webhook "a.b" denied the request: no', "AdmissionDenied", "owner of that policy", True),
        ('pods "x" is forbidden: maximum memory usage per Container is 1Gi', "LimitRange", "kubectl describe limitrange", True),
        ('error looking up service account ns/own: serviceaccount "own" not found', "FailedCreate", "Create that ServiceAccount", True),
        ('pods "x" is forbidden: no PriorityClass with name batch was found', "FailedCreate", "Create PriorityClass batch", True),
        ('pods "x" is forbidden: pod rejected: RuntimeClass "kata" not found', "FailedCreate", "correct runtimeClassName", True),
        ('Pod "x" is invalid: spec.volumes[0]', "FailedCreate", r"Correct spec\.podTemplate", True),
        ("etcd timeout", "FailedCreate", "retries automatically", False),
    ],
)
def test_refused_pods_have_a_cause(message: str, reason: str, words: str, template: bool) -> None:
    cause = creation.make_failure_cause("FailedCreate", message, "worker")
    assert (cause.reason, cause.fault, cause.template) == (reason, True, template)
    assert re.search(words, cause.message) and message in cause.message


def test_a_refused_child_has_the_advice_of_its_refusal() -> None:
    words = 'services "qwen" is forbidden: exceeded quota: team, requested: services=1, used: services=0, limited: services=0'
    assert "Raise the ResourceQuota team" in creation.make_refusal_cause("Service/qwen", words, component="router", template=False).message
    words = 'services is forbidden: User "operator" cannot create resource "services"'
    assert "helm upgrade" in creation.make_refusal_cause("Service/qwen", words, component="router", template=False).message


def test_a_long_description_is_truncated_and_the_advice_is_not() -> None:
    cause = make_cause("X", "word " * 1000, "Do this.")
    assert len(cause.message) <= LONGEST and cause.message.endswith("…. Do this.")


def test_a_pod_that_has_ended_does_not_hide_the_one_that_replaces_it() -> None:
    old = pod("a", phase="Failed", reason="Evicted", message="low on memory")
    new = pod("b", containerStatuses=[container({"running": {}}, started=False)])
    cause = causes.find_worst_cause([old, new], "worker", "")
    assert cause is not None and cause.reason == "Loading"
    old["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-01-01T12:00:00Z"}]
    since = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC).timestamp()
    lost = causes.find_worst_cause([old, new], "worker", "", ended_after=since)
    assert lost is not None and (lost.reason, lost.fault) == ("Evicted", True), "the capacity that is missing now"
    later = causes.find_worst_cause([old, new], "worker", "", ended_after=since + 1)
    assert later is not None and later.reason == "Loading", "it ended long before"
