"""Each reason of a service: taken from the state of its pods and Deployments, with Kubernetes' own message and what to do next."""

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

TABLE: list[tuple[str, dict[str, Any], tuple[str, str] | None, str, str]] = [
    # name of the case → status of the pod, an Event of it, reason, words that must be there
    ("no GPU", unscheduled(GPU), None, "FailedScheduling", r"short of nvidia\.com/gpu on 3 of 3 nodes.*set spec\.resources\.gpus: 0"),
    (
        "no MIG slice",
        unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/mig-1g.10gb."),
        None,
        "FailedScheduling",
        r"Add a node with nvidia\.com/mig-1g\.10gb.*correct spec\.resources\.gpuResource",
    ),
    ("no AMD GPU", unscheduled("0/3 nodes are available: 3 Insufficient amd.com/gpu."), None, "FailedScheduling", "Free a GPU"),
    (
        "no DRA device",
        unscheduled("0/3 nodes are available: 3 cannot allocate all claims."),
        None,
        "FailedScheduling",
        "ResourceClaimTemplate selects.*kubectl get resourceslices",
    ),
    (
        "no DRA template",
        {"phase": "Pending"},
        ("FailedResourceClaimCreation", 'PodResourceClaim gpu: resource claim template "h100": not found'),
        "FailedResourceClaimCreation",
        "h100.*Create the ResourceClaimTemplate that spec.resources.resourceClaims names",
    ),
    ("memory", unscheduled("0/2 nodes are available: 2 Insufficient memory."), None, "FailedScheduling", r"Lower spec\.resources\.memory"),
    (
        "taint",
        unscheduled("0/1 nodes are available: 1 node(s) had untolerated taint {gpu: yes}."),
        None,
        "FailedScheduling",
        "Tolerate gpu: yes",
    ),
    (
        "taints, as Kubernetes 1.36 reports them",
        unscheduled("0/2 nodes are available: 2 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/2 nodes."),
        None,
        "FailedScheduling",
        r"had untolerated taint\(s\)\. Tolerate the node's taints",
    ),
    (
        "volume on another node",
        unscheduled(
            "0/9 nodes are available: 7 Too many pods, 1 Insufficient cpu, 1 node(s) didn't match PersistentVolume's node affinity."
        ),
        None,
        "FailedScheduling",
        "The claim's volume is on another node.*Lower spec.resources.cpu",
    ),
    (
        "no claim",
        unscheduled('persistentvolumeclaim "weights" not found'),
        None,
        "FailedScheduling",
        "Create the PersistentVolumeClaim weights",
    ),
    ("no node", unscheduled("no nodes available to schedule pods"), None, "FailedScheduling", "add one"),
    ("gated", unscheduled("waits for Kueue", "SchedulingGated"), None, "SchedulingGated", "waits for its scheduling gates"),
    ("pull, 404", waiting("ErrImagePull", "manifest unknown"), None, "ImagePullBackOff", "worker:1: manifest unknown.*Correct the image"),
    ("pull, 401", waiting("ImagePullBackOff", "Back-off: ErrImagePull: 401 Unauthorized"), None, "ImagePullBackOff", "pull secret"),
    (
        "pull, platform",
        waiting("ErrImagePull", "no match for platform in manifest: not found"),
        None,
        "ImagePullBackOff",
        "node's processor",
    ),
    (
        "pull, again",
        waiting("ImagePullBackOff", 'Back-off pulling "a": ErrImagePull: not found'),
        None,
        "ImagePullBackOff",
        "worker:1: not found",
    ),
    ("pull, network", waiting("ErrImagePull", "dial tcp: no such host"), None, "ImagePullBackOff", "cannot reach the registry"),
    ("image name", waiting("InvalidImageName", "couldn't parse image name"), None, "InvalidImageName", "in lower case"),
    ("never pull", waiting("ErrImageNeverPull", "not present"), None, "ErrImageNeverPull", "imagePullPolicy"),
    (
        "no Secret",
        waiting("CreateContainerConfigError", 'secret "hub" not found'),
        None,
        "CreateContainerConfigError",
        "Create the Secret hub",
    ),
    (
        "no key",
        waiting("CreateContainerConfigError", "couldn't find key token in Secret ns/hub"),
        None,
        "CreateContainerConfigError",
        "Put the key token into the Secret hub",
    ),
    (
        "as root",
        waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"),
        None,
        "CreateContainerConfigError",
        "USER",
    ),
    ("driver", waiting("RunContainerError", "nvidia-container-cli: initialization error"), None, "RunContainerError", "GPU operator"),
    (
        "hub 401",
        hub("no such repository, or it is private and HF_TOKEN does not open it (401)"),
        None,
        "HubUnauthorized",
        r"spec\.model\.secretRef",
    ),
    (
        "hub 403",
        hub("the repository is gated (403): accept its terms on the hub and set HF_TOKEN"),
        None,
        "HubForbidden",
        "Accept the model's terms",
    ),
    (
        "hub 404",
        hub("no such repository, or it is private and HF_TOKEN does not open it (404)"),
        None,
        "ModelNotFound",
        r"Correct spec\.model\.uri",
    ),
    ("hub revision", hub("the repository has no revision 'x' (404)"), None, "ModelNotFound", "revision"),
    ("hub 429", hub("the hub answered 429: slow down"), None, "HubRateLimited", r"spec\.model\.cache"),
    ("hub 503", hub("the hub answered 503: away"), None, "HubUnreachable", "retries automatically"),
    ("hub away", hub("the hub cannot be reached and the files are not cached here (x)"), None, "HubUnreachable", "NetworkPolicy"),
    ("disk full", hub("download failed: [Errno 28] No space left on device"), None, "DiskFull", "larger volume"),
    ("no folder", hub("there is no /mnt/model/x; correct the path, or mount its volume"), None, "ModelNotFound", "Correct the path"),
    ("GPU memory", ended("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), None, "GpuOutOfMemory", "tensorParallel"),
    ("weights", hub("missing weights: no model.safetensors in /m"), None, "WeightsInvalid", "download the model again"),
    (
        "GGUF cut off",
        hub("m.gguf: tensor t ends: the file is damaged or incomplete, fetch or convert it again"),
        None,
        "WeightsInvalid",
        "again",
    ),
    (
        "GGUF type",
        hub("m.gguf: tensor t has type Q2_K, which is not supported: quantize the model as F32"),
        None,
        "ModelUnsupported",
        "supported",
    ),
    ("GGUF models", hub("there are 2 GGUF models in /mnt/model, such as a.gguf, b.gguf: name one"), None, "ModelNotFound", r"\.gguf file"),
    (
        "quantization",
        hub("--quantization int8 needs --dtype bfloat16 or float32"),
        None,
        "ModelUnsupported",
        "spec.engine.quantization",
    ),
    ("architecture", hub("unsupported architecture: transformers has no causal LM"), None, "ModelUnsupported", "Choose a model"),
    ("store 403", hub("the store refuses access (403): the key may not read it"), None, "StoreForbidden", "read that bucket"),
    ("store 401", hub("the store asks for credentials (401): give them"), None, "StoreUnauthorized", "AWS_ACCESS_KEY_ID"),
    ("store away", hub("the bucket cannot be reached: see spec.model.endpoint"), None, "StoreUnreachable", "DNS"),
    ("no bucket", hub("there is no such bucket (404): see spec.model.uri"), None, "ModelNotFound", "Correct the bucket"),
    ("cache full", hub("/var/cache/fairlead is full (0.1 GiB free): enlarge it"), None, "DiskFull", "larger volume"),
    (
        "cache too small",
        hub("80.0 GiB are still to be downloaded, and /var/cache/fairlead has 60.1 GiB free: enlarge it"),
        None,
        "DiskFull",
        "larger volume",
    ),
    ("cache empty", hub("it is not in /c, which cannot be written: make spec.model.cache writable"), None, "CacheNotWritable", "fsGroup"),
    ("length", hub("--max-model-len 128 is more than the model's 64"), None, "ModelUnsupported", "Lower spec.engine.maxModelLen"),
    ("config", hub("config.json cannot be read: Unterminated string"), None, "WeightsInvalid", "download the model again"),
    (
        "adapter",
        ended("cannot load LoRA adapter sql from file:///m: no adapter_config.json in /m"),
        None,
        "AdapterLoadFailed",
        r"Correct spec\.model\.adapters",
    ),
    (
        "router certificate",
        ended("fairlead-router: --ssl-certfile a with --ssl-keyfile b cannot be used: KEY_VALUES_MISMATCH", 2, restartCount=3),
        None,
        "CrashLoopBackOff",
        "into the Secret of spec.router.tls",
    ),
    ("cache read-only", hub("/var/cache/fairlead may not be written by user 65532"), None, "CacheNotWritable", "fsGroup"),
    ("other model fault", hub("something else"), None, "ModelLoadFailed", "kubectl logs"),
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
    (
        "no Secret to mount",
        CREATING,
        ("FailedMount", 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'),
        "FailedMount",
        "Create the Secret keys",
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
    states = [ended(words), ended(words, restartCount=5), waiting("CrashLoopBackOff")]
    states[2]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1, "message": words}}
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
