"""The fields of the manifest that shape the pods of each component: advice names those of the object that fails. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fairlead_operator import names


@dataclass(frozen=True)
class Fields:
    """Where the manifest sets what a pod of one component has."""

    template: str  # a podTemplate
    claim: str  # names the PersistentVolumeClaim
    image: str  # of the component's own container
    count: str  # of pods; empty: one
    requests: str  # sets CPU and memory of the component's own containers; empty: `template` alone
    pods: str  # plural, for people
    own: tuple[str, ...]  # containers that `requests` and `image` are for, the main one first

    @property
    def words(self) -> dict[str, str]:
        """Return the replacements in advice."""
        return {
            "template": self.template,
            "claim": self.claim,
            "pods": self.pods,
            "cpu": self.describe("requests.cpu"),
            "memory": self.describe("requests.memory"),
            "resources": self.requests or self.template,
            "fewer": f", or lower {self.count}" if self.count else "",
        }

    def describe(self, resource: str, container: str = "") -> str:
        """Return the field that sets `resource`, such as `limits.cpu`, of a container; empty: the component's own."""
        kind, _, name = resource.partition(".")
        container = container or self.own[0]
        # spec.resources.cpu is a request only; spec.resources.memory is request and limit.
        if self.requests and container in self.own and (name == "memory" or (name, kind) == ("cpu", "requests")):
            return f"{self.requests}.{name}"
        where = "initContainers" if container == names.ENGINE else "containers"
        return f"resources.{kind}.{name} of container {container} in {self.template}.spec.{where}"

    def describe_image(self, container: str) -> str:
        """Return what sets the image of a container."""
        if container == names.AGENT:
            return "the chart's images, or spec.routing.image"
        if container in self.own:
            return f"the chart's images, or {self.image}"
        return f"that of container {container} in {self.template}"


_WORKERS = Fields(
    template="spec.podTemplate",
    claim="spec.model",
    image="spec.engine.image",
    count="spec.replicas",
    requests="spec.resources",
    pods="workers",
    own=(names.WORKER,),
)
_ENGINES = replace(_WORKERS, own=(names.ENGINE,))
"""Of workers with runtime VLLM or SGLang."""
_OF = {
    names.WORKER: _WORKERS,
    names.FOLLOWER: _WORKERS,
    names.CANARY: _WORKERS,
    names.ROUTER: Fields(
        template="spec.router.podTemplate",
        claim="spec.router.podTemplate",
        image="spec.routing.image",
        count="spec.routing.replicas",
        requests="",
        pods="routers",
        own=(names.ROUTER,),
    ),
    names.BATCH: Fields(
        template="spec.batch.podTemplate",
        claim="spec.batch.storageURI",
        image="spec.routing.image",
        count="",
        requests="",
        pods="the batch server",
        own=(names.BATCH,),
    ),
    names.PREFETCH: Fields(
        template="spec.podTemplate",
        claim="spec.model.cache",
        image="spec.engine.image (runtime VLLM or SGLang: spec.routing.image)",
        count="",
        requests="",
        pods="the Job",
        own=(names.WORKER,),
    ),
}


def fields_of(component: str, pod_spec: Mapping[str, Any] | None = None) -> Fields:
    """Return the fields for a value of the component label; those of workers where it is unknown. `pod_spec`: shows the runtime."""
    found = _OF.get(component, _WORKERS)
    has_engine = any(one.get("name") == names.ENGINE for one in (pod_spec or {}).get("initContainers") or [])
    return _ENGINES if found is _WORKERS and has_engine else found


def fields_of_pod(pod: Mapping[str, Any]) -> Fields:
    return fields_of(str(((pod.get("metadata") or {}).get("labels") or {}).get(names.COMPONENT, "")), pod.get("spec"))
