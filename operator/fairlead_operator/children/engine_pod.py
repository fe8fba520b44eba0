"""The containers of a worker with runtime VLLM or SGLang: the engine, and the agent that serves for it.

The engine is a sidecar container of Kubernetes (an init container with restartPolicy Always), and the agent is the pod's regular container.
The kubelet stops sidecars after the regular containers. That is the order of a drain, without a hook in the engine's image: at SIGTERM the
agent leaves the index and waits for its streams while the engine runs on; once the agent has exited, the engine gets SIGTERM. An engine
that gets SIGTERM first aborts its requests. A preStop hook of two regular containers would give this order only as long as the agent
answers.

Each container restarts by itself: the agent reports an engine that is gone, and starts a new incarnation in the index.
"""

from collections.abc import Iterable
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import engine_flags, pods
from fairlead_operator.children.model_source import ModelSource
from fairlead_operator.objects import Object
from fairlead_operator.rollout.images import router_image, worker_image
from fairlead_operator.settings import Settings

ANNOTATIONS = {"kubectl.kubernetes.io/default-container": names.ENGINE}
AGENT_TMP = pods.Mounted("agent-tmp", "/tmp", {"emptyDir": {}}, read_only=False)
_HANG_SECONDS, _HANG_PERIOD = 600, 10
"""The agent's image may be pulled after the engine has started, and until the agent answers, the probe fails."""


def engine(service: InferenceService, settings: Settings, source: ModelSource, resources: Object) -> Object:
    """Return the engine's container. It listens on the loopback only."""
    own = [
        {"name": "HOME", "value": "/tmp"},  # the root file system is read-only; kernels are compiled into ~/.cache
        {"name": "USER", "value": "fairlead"},  # torch asks for the name of the user, which the image's passwd does not have
        {"name": "DO_NOT_TRACK", "value": "1"},
        *source.env,
    ]
    return pods.make_container(
        settings,
        names.ENGINE,
        worker_image(service, settings),
        engine_flags.COMMANDS[service.spec.engine.runtime],
        engine_flags.arguments(service, source),
        [pods.TMP, pods.SHM, *source.mounted],
        restartPolicy="Always",
        env=override(own, engine_environment(service)),
        resources=resources,
        livenessProbe={
            # Of the agent: the engine's port is closed to the kubelet, and a restart of the agent would not help a hung engine.
            "httpGet": {"path": "/engine/health", "port": names.WORKER_ADMIN_PORT},
            "periodSeconds": _HANG_PERIOD,
            "failureThreshold": _HANG_SECONDS // _HANG_PERIOD,
            "timeoutSeconds": 5,
        },
        terminationMessagePath=pods.TERMINATION_LOG,
    )


def agent(
    service: InferenceService, settings: Settings, source: ModelSource, mounted: Iterable[pods.Mounted], env: Iterable[Object]
) -> Object:
    """Return the agent's container. `env`: the identity of the worker, and how it reaches the index."""
    flags: dict[str, object] = {
        "runtime": service.spec.engine.runtime.lower(),
        "engine-url": f"http://127.0.0.1:{engine_flags.ENGINE_PORT}",
        "kv-events": engine_flags.EVENTS,
        "kv-replay": engine_flags.REPLAY,
        "model": source.uri,
        "served-model-name": service.served_model_name,
        "host": "0.0.0.0",
        "port": names.WORKER_PORT,
        "drain-timeout": service.spec.rollout.drain_timeout_seconds,
    }
    return pods.make_container(
        settings,
        names.AGENT,
        router_image(service, settings),
        ["fairlead-agent"],
        pods.command_line(flags),
        [AGENT_TMP, *mounted],
        env=override([*env, *source.env], hub_environment(service)),
        resources=pods.CONTROL_RESOURCES,
        **pods.SERVING,
    )


def engine_environment(service: InferenceService) -> list[Object]:
    """Return `spec.engine.env` as in a PodSpec."""
    return [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in service.spec.engine.env]


def hub_environment(service: InferenceService) -> list[Object]:
    """Return the variables of `spec.engine.env` that reach the hub: the agent reads the tokenizer from there, and a Job the model."""
    return [one for one in engine_environment(service) if _is_of_hub(str(one["name"]).upper())]


def _is_of_hub(name: str) -> bool:
    return name.endswith("_PROXY") or name.startswith("HF_") or name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


def override(ours: Iterable[Any], theirs: Iterable[Any]) -> list[Any]:
    """Return variables by name; those of the user win."""
    return list({one["name"]: one for one in (*ours, *theirs)}.values())
