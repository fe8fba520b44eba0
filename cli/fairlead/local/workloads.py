"""Deployments as workloads of the local kubelet. No I/O."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead.errors import UserError
from fairlead.local.containers import LOOPBACK
from fairlead.local.engine import engine_container
from fairlead.local.rundir import BATCH_SECRET

KEY_FILE_VARIABLE = "FAIRLEAD_API_KEYS_FILE"
COMPONENT = "app.kubernetes.io/component"
INSTANCE = "app.kubernetes.io/instance"


@dataclass(frozen=True)
class LocalSettings:
    """Settings of all local pods. `threads`: CPU threads of each worker (0: the worker's own choice)."""

    redis_url: str
    endpoints: Path
    logs: Path
    threads: int = 0
    model_root: Path | None = None
    router_host: str = LOOPBACK

    @property
    def batch_secret(self) -> Path:
        """File of the secret that routers and batch servers share, and from which routers derive the keys of stored responses."""
        return self.logs.parent / BATCH_SECRET

    def endpoints_file(self, service: str) -> Path:
        return self.endpoints / service


@dataclass(frozen=True)
class Workload:
    """A Deployment: `replicas` pods of `template`.

    `port`: fixed for the router, which users call, and the batch server; 0 for workers: any free port. `partner_port`: that of the other of
    the two; 0 without a batch server.
    """

    name: str
    namespace: str
    service: str
    component: str
    replicas: int
    template: Mapping[str, Any]
    port: int = 0
    partner_port: int = 0

    @property
    def revision(self) -> str:
        """Return a digest that changes when pods must be replaced."""
        return hashlib.sha256(json.dumps([self.template, self.port, self.partner_port], sort_keys=True).encode()).hexdigest()[:12]

    @property
    def grace(self) -> float:
        """Return the seconds from SIGTERM to SIGKILL."""
        return float(self.template["spec"].get("terminationGracePeriodSeconds", 30))

    @property
    def labels(self) -> dict[str, str]:
        return dict((self.template.get("metadata") or {}).get("labels") or {})

    def flags(self, port: int, settings: LocalSettings) -> list[str]:
        """Return flags that replace those of a cluster. They follow the Deployment's own, and the last one wins."""
        # One port serves all paths: without --host only this machine can reach it.
        flags = ["--host", settings.router_host if self.component == "router" else LOOPBACK, "--port", str(port)]
        if self.component == "batch":
            return [*flags, "--router-url", f"http://{LOOPBACK}:{self.partner_port}", "--secret-file", str(settings.batch_secret)]
        if self.component == "router":
            flags += ["--admin-port=", "--worker-admin-port=", "--redis-url", settings.redis_url]
            flags += ["--console"] if settings.router_host == LOOPBACK else []
            # Local endpoints are current, so a stopping router need not accept new connections for a while.
            flags += ["--workers", f"file://{settings.endpoints_file(self.service)}", "--drain-grace", "0"]
            if self.partner_port:
                flags += ["--batch-url", f"http://{LOOPBACK}:{self.partner_port}"]
            flags += ["--batch-secret-file", str(settings.batch_secret)]  # with keys, `fairlead up` reads admin paths with it
            return [*flags, "--api-keys-file", self._key_file] if self._keyed else flags
        if engine_container(self.template) is not None:
            return flags  # the engine chooses its own threads
        return [*flags, "--threads", str(settings.threads)] if settings.threads and not self._sets_threads else flags

    def variables(self, pod: str, port: int, settings: LocalSettings) -> dict[str, str]:
        """Return environment variables that replace those of a cluster. An empty one counts as unset."""
        if self.component == "router":
            return {"FAIRLEAD_RESPONSES_SECRET_FILE": str(settings.batch_secret)}
        if self.component != "worker":
            return {}
        return {
            "FAIRLEAD_POD_NAME": pod,
            "FAIRLEAD_ADVERTISE": f"{LOOPBACK}:{port}",
            "FAIRLEAD_ADMIN_PORT": "",
            "FAIRLEAD_REDIS_URL": settings.redis_url,
            "FAIRLEAD_TERMINATION_LOG": str(settings.logs / f"{pod}.termination"),
            "FAIRLEAD_PEERS": f"file://{settings.endpoints_file(self.service)}",
        }

    @property
    def _keyed(self) -> bool:
        return any(volume["name"] == "api-keys" for volume in self.template["spec"].get("volumes", ()))

    @property
    def _key_file(self) -> str:
        """Return the key file that replaces the Secret. Raises UserError without one."""
        path = os.environ.get(KEY_FILE_VARIABLE, "")
        if not path:
            raise UserError(
                f"the manifest takes API keys from a Secret, which local mode does not have: set {KEY_FILE_VARIABLE} to a key file"
            )
        return str(Path(path).absolute())

    @property
    def _sets_threads(self) -> bool:
        """Return whether the manifest sets the number of threads of a worker."""
        args = self.template["spec"]["containers"][0].get("args", ())
        return any(arg.startswith("--threads=") and arg != "--threads=0" for arg in args)


def workloads(objects: Iterable[Mapping[str, Any]], *, service: str, router_port: int, batch_port: int = 0) -> list[Workload]:
    """Return the Deployments among `objects`. There is always one router, because no Service could balance several."""
    found, deployments = [], list(objects)
    has_batches = any(_component(item) == "batch" for item in deployments if item.get("kind") == "Deployment")
    for item in deployments:
        if item.get("kind") == "LeaderWorkerSet":
            raise UserError(
                "spec.engine.nodes is above 1, but local mode has one machine: set it to 1 (ranks are processes), or use a cluster"
            )
        if item.get("kind") != "Deployment":
            continue
        template, component = item["spec"]["template"], _component(item)
        ports = {"worker": (0, 0), "router": (router_port, batch_port if has_batches else 0), "batch": (batch_port, router_port)}
        if component not in ports:
            raise UserError(
                f"Deployment {item['metadata']['name']}: label {COMPONENT} is {component!r}; local mode runs {', '.join(ports)}"
            )
        found.append(
            Workload(
                name=item["metadata"]["name"],
                namespace=item["metadata"].get("namespace", "default"),
                service=service,
                component=component,
                replicas=1 if component == "router" else int(item["spec"].get("replicas", 1)),
                template=template,
                port=ports[component][0],
                partner_port=ports[component][1],
            )
        )
    return found


def _component(deployment: Mapping[str, Any]) -> str:
    return str(deployment["spec"]["template"]["metadata"]["labels"].get(COMPONENT, ""))
