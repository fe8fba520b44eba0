"""Finds why a container does not run, from its waiting, running and terminated states."""

import re
from collections.abc import Mapping
from typing import Any

from fairlead_operator import names
from fairlead_operator.causes import weights
from fairlead_operator.causes.cause import Cause, find_advice, last_line, make_cause, truncate
from fairlead_operator.causes.events import probe_message
from fairlead_operator.causes.fields import Fields
from fairlead_operator.observed import PodEvent

IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
CONTAINER = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreStartHookError", "PostStartHookError"}
CRASHES = ("OOMKilled", "ProbeFailed", "CrashLoopBackOff", "Crashed")
KILLED = (137, 143)  # exit codes of SIGKILL and SIGTERM, which a kubelet sends after a failed probe

_IMAGE_ADVICE = (
    (
        r"unauthorized|authentication required|denied|forbidden|\b40[13]\b",
        "Give the pods a pull secret that may read it (imagePullSecrets): spec.imagePullSecrets, or the chart's images.pullSecrets.",
    ),
    (r"no match for platform|exec format", "The image is not built for this node's processor: choose other nodes or another image."),
    (r"not found|manifest unknown|\b404\b", "Correct the image: {image}."),
    (r"toomanyrequests|rate limit|\b429\b", "The registry limits pulls: wait, log in with a pull secret, or mirror the image."),
    (
        r"no such host|timeout|timed out|refused|x509|unreachable|EOF",
        "The node cannot reach the registry: check its network, proxy and certificates.",
    ),
    (r"no space left", "The node's disk is full: free it, or choose other nodes."),
)
_CONFIG_ADVICE = (
    (r'secret "([^"]+)" not found', "Create the Secret {0} in this namespace: the pod then starts automatically."),
    (r"couldn't find key (\S+) in Secret \S+?/(\S+)", "Put the key {0} into the Secret {1}."),
    (r'configmap "([^"]+)" not found', "Create the ConfigMap {0} in this namespace."),
    (r"couldn't find key (\S+) in ConfigMap \S+?/(\S+)", "Put the key {0} into the ConfigMap {1}."),
    (r"runAsNonRoot", "The image runs as root, which is forbidden here: use one with a numeric USER."),
    (r"nvidia", "The node's NVIDIA driver or container toolkit fails: see the GPU operator's pods there."),
)

_CRASH_ADVICE = ((r"--ssl-certfile .* cannot be used", "Put a certificate and its own key into the Secret of spec.router.tls."),)


def has_served(container: Mapping[str, Any], readiness: Mapping[str, Any]) -> bool:
    """Return whether the container was ready since its present start: only then did its pod's condition Ready change after the start.

    A passed startup probe means less: one that follows the loading progress passes before the load has ended.
    """
    since, changed = ((container.get("state") or {}).get("running") or {}).get("startedAt"), readiness.get("lastTransitionTime")
    return str(changed) > str(since) if since and changed else bool(container.get("started"))


def find_container_cause(
    pod: str, container: Mapping[str, Any], fields: Fields, readiness: Mapping[str, Any] | None = None, event: PodEvent | None = None
) -> Cause | None:
    """Return None for a healthy or completed container. `readiness`: the pod's condition Ready; `event`: its newest relevant Event."""
    if container.get("ready"):
        return None
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting, terminated = state.get("waiting") or {}, state.get("terminated")
    reason = waiting.get("reason", "")
    if reason in IMAGE:
        return _image(pod, container, fields, reason, str(waiting.get("message") or reason))
    if reason in CONTAINER:
        words = str(waiting.get("message") or reason)
        return make_cause(reason, f"pod {pod}: {words}", _advise(_CONFIG_ADVICE, words) or f"See kubectl describe pod {pod}.")
    if terminated and terminated.get("exitCode") == 0 and not last.get("terminated"):
        return None  # a completed init container
    served = has_served(container, readiness or {})
    ended = terminated or (None if served else last.get("terminated"))
    if ended and (ended.get("exitCode") != 0 or reason == "CrashLoopBackOff"):
        return _crashed(pod, container, fields, ended, reason, event)
    if state.get("running") is not None:
        if not served and container.get("name") in names.SERVING:
            return Cause("Loading", f"pod {pod} is loading the model", fault=False)
        if not served:  # a router, an init container, or the proxy of a mesh
            return Cause("Starting", f"pod {pod}: container {container.get('name')} is not ready yet", fault=False)
        seen = probe_message(event)
        why = f": {seen}" if seen else ": it is draining or has lost its engine"
        return Cause("NotReady", truncate(f"pod {pod} runs but is not ready{why}"), fault=False)
    return Cause("Starting", f"pod {pod} is starting", fault=False)


def _image(pod: str, container: Mapping[str, Any], fields: Fields, reason: str, words: str) -> Cause:
    # ErrImagePull and ImagePullBackOff alternate. The second contains the first one's detail after a prefix.
    detail = words.rsplit("ErrImagePull: ", 1)[-1]
    what = f"pod {pod}: image {container.get('image', '?')}: {detail}"
    if reason == "InvalidImageName":
        return make_cause(reason, what, "Correct the image's name: registry/repository:tag, in lower case.")
    if reason == "ErrImageNeverPull":
        return make_cause(reason, what, "Load the image onto the node, or set imagePullPolicy to IfNotPresent.")
    do = _advise(_IMAGE_ADVICE, detail, image=fields.describe_image(str(container.get("name"))))
    return make_cause("ImagePullBackOff", what, do or "Pull the image manually on the node to see the registry's error.")


def _crashed(
    pod: str, container: Mapping[str, Any], fields: Fields, ended: Mapping[str, Any], waiting: str, event: PodEvent | None
) -> Cause:
    """Return a specific cause for an OutOfMemory kill and for a model that cannot be loaded.

    Otherwise the second exit, or a back-off, counts as a crash loop (restartCount never decreases).
    """
    message = last_line(str(ended.get("message") or ""))
    if ended.get("reason") == "OOMKilled":
        field = fields.describe("limits.memory", str(container.get("name")))
        what = f"pod {pod}: {container.get('name')} was killed: {message or f'it used more memory than {field} allows'}"
        return make_cause("OOMKilled", what, f"Raise {field} (weights on CPUs, page buffers and downloads count), or remove the limit.")
    loading = weights.find_cause(pod, message)
    if loading is not None:
        return loading
    code = ended.get("exitCode")
    seen = probe_message(event)
    if code in KILLED and seen:
        do = f"The kubelet restarted it: see kubectl logs {pod} --previous, and allow more time or reduce the load."
        return make_cause("ProbeFailed", f"pod {pod}: {seen}", do)
    looping = waiting == "CrashLoopBackOff" or int(container.get("restartCount") or 0) >= 2
    what = f"pod {pod}: {container.get('name')} exited with code {code}: {message or 'it left no message'}"
    do = _advise(_CRASH_ADVICE, message) or f"See kubectl logs {pod} -c {container.get('name')} --previous."
    return make_cause("CrashLoopBackOff" if looping else "Crashed", what, do)


def _advise(table: tuple[tuple[str, str], ...], message: str, **words: str) -> str:
    return next(iter(find_advice(table, message, words, re.IGNORECASE)), "")
