"""One local run: Redis, the kubelet and a directory, from start to clean-up."""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from fairlead.local.containers import LOOPBACK
from fairlead.local.kubelet import Kubelet, free_port
from fairlead.local.manifest import Manifest, objects_of
from fairlead.local.pod import Pod
from fairlead.local.process import Guard
from fairlead.local.redis import LocalRedis
from fairlead.local.rundir import BATCH_SECRET, PodRecord, RunRecord, make_run_directory, remove_run_directory, write_record
from fairlead.local.usage import curl_command
from fairlead.local.workloads import LocalSettings, Workload, workloads

LONGEST_TMP = 80


class PodFailed(Exception):
    """A pod ended before it was ready. The message has the end of its log and the log's path."""


class LocalCluster:
    """A local run, as an async context manager. Call `apply` for each version of the manifest; leaving the context stops everything."""

    def __init__(
        self,
        name: str,
        *,
        port: int,
        host: str = LOOPBACK,
        host_env: Mapping[str, str],
        cpus: int,
        model_root: Path | None = None,
        stop_grace: float = 10.0,
        keep_files: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = make_run_directory(name)
        self.urls: dict[str, str] = {}
        self.idle: tuple[str, ...] = ()
        """Services without workers."""
        self._port = port
        self._host = host
        self._host_env = {**host_env, **self._own_tmp()}
        self._cpus = cpus
        self._model_root = model_root
        self._stop_grace = stop_grace
        self._keep_files = keep_files
        self._on_change = on_change
        self._batch_ports: dict[str, int] = {}
        """Port of each service's batch server, fixed so that an edit of the manifest does not restart it."""
        self._changed = asyncio.Event()
        self._guard = Guard()
        self._record: RunRecord | None = None
        self._manifest: Manifest | None = None
        self._redis: LocalRedis | None = None
        self._kubelet: Kubelet | None = None

    async def __aenter__(self) -> "LocalCluster":
        self._guard.__enter__()
        try:
            self._redis = await LocalRedis.start(self.directory, env=self._plain_env(), guard=self._guard)
        except BaseException:
            self._guard.__exit__(None, None, None)
            if not self._keep_files:  # the error already quotes Redis' log
                await remove_run_directory(self.directory)
            raise
        self._kubelet = Kubelet(self._settings(0), guard=self._guard, host_env=self._host_env, on_change=self._on_pod_change)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self.kubelet.close(self._stop_grace)
            await self.redis.stop()
        finally:
            self._guard.__exit__(kind, error, trace)
        if not self._keep_files and not isinstance(error, PodFailed | TimeoutError):
            await remove_run_directory(self.directory)

    @property
    def redis(self) -> LocalRedis:
        assert self._redis is not None, "enter the cluster first"
        return self._redis

    @property
    def kubelet(self) -> Kubelet:
        assert self._kubelet is not None, "enter the cluster first"
        return self._kubelet

    @property
    def credential(self) -> dict[str, str]:
        assert self._record is not None, "apply a manifest first"
        return self._record.credential

    def pods(self) -> list[Pod]:
        """Return all pods that run now; none before the context is entered."""
        return self._kubelet.pods() if self._kubelet else []

    def is_ready(self) -> bool:
        return self.kubelet.all_ready()

    def apply(self, manifest: Manifest) -> None:
        """Run what `manifest` describes. Raises UserError, and changes nothing, if it cannot run on this machine."""
        wanted: list[Workload] = []
        urls: dict[str, str] = {}
        for offset, service in enumerate(manifest.services):
            port = self._port + offset
            urls[service.name] = f"http://{LOOPBACK}:{port}"
            if service.name not in self._batch_ports:
                self._batch_ports[service.name] = free_port({port, *self._batch_ports.values()})
            objects = objects_of(service, redis_url=self.redis.url)
            wanted += workloads(objects, service=service.name, router_port=port, batch_port=self._batch_ports[service.name])
        workers = sum(workload.replicas for workload in wanted if workload.component == "worker")
        if self.kubelet.settings.threads == 0:  # fixed at the first apply, so that scaling restarts no running pod
            self.kubelet.settings = self._settings(max(1, self._cpus // max(1, workers)))
        self.kubelet.apply(wanted)
        self.urls, self._manifest = urls, manifest
        self.idle = tuple(workload.service for workload in wanted if workload.component == "worker" and not workload.replicas)
        replicas = {workload.service: workload.replicas for workload in wanted if workload.component == "worker"}
        self._record = RunRecord(
            pid=os.getpid(),
            command=manifest.command,
            urls=urls,
            replicas=replicas,
            models={service.name: service.served_model_name for service in manifest.services},
            calls={
                service.name: curl_command(urls[service.name], service.served_model_name, needs_key=service.spec.access is not None)
                for service in manifest.services
            },
            manifest=str(manifest.path.absolute()) if manifest.path else "",
            secret_file=str(self.directory / BATCH_SECRET),
        )
        self._write_pods()

    def wake(self, name: str) -> None:
        """Start one worker of a service whose manifest asks for none. The next `apply` follows the manifest again."""
        assert self._manifest is not None, "apply a manifest first"
        services = tuple(
            replace(service, spec=service.spec.model_copy(update={"replicas": 1})) if service.name == name else service
            for service in self._manifest.services
        )
        self.apply(replace(self._manifest, services=services))

    async def wait_ready(self, timeout: float) -> None:
        """Wait until every wanted pod is ready. Raises PodFailed as soon as one has ended twice.

        Raises TimeoutError after `timeout` seconds. Its message names the pods that are not ready and the logs.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._all_ready()
        except TimeoutError:
            states = {pod.name: pod.state for pod in self.kubelet.pods() if not pod.state.ready}
            waiting = "; ".join(f"{name}: {state.phase} {state.reason}".rstrip() for name, state in states.items())
            raise TimeoutError(
                f"not ready within --ready-timeout {timeout:g} s ({waiting or 'a pod has not started yet'}); logs: {self.directory}/logs. "
                "A first start reads gigabytes of libraries from the disk: on a busy machine set a longer --ready-timeout."
            ) from None

    async def _all_ready(self) -> None:
        while not self.is_ready():
            for pod in self.kubelet.pods():
                if pod.state.restarts >= 2:
                    raise PodFailed(describe_failure(pod))
            self._changed.clear()
            await self._changed.wait()

    def _write_pods(self) -> None:
        """Write the state of the pods for `fairlead status`, `top` and `explain`."""
        pods = [record_pod(member.pod, member.workload.service, member.workload.component) for member in self.kubelet.members]
        if self._record and pods != self._record.pods:
            self._record = replace(self._record, pods=pods)
            write_record(self.directory, self._record)

    def _on_pod_change(self) -> None:
        if self._kubelet and self.directory.is_dir():
            self._write_pods()
        self._changed.set()
        self._on_change()

    def _settings(self, threads: int) -> LocalSettings:
        return LocalSettings(
            redis_url=self.redis.url,
            endpoints=self.directory / "endpoints",
            logs=self.directory / "logs",
            threads=threads,
            router_host=self._host,
            model_root=self._model_root,
        )

    def _own_tmp(self) -> dict[str, str]:
        """Return TMPDIR for the pods: a directory of the run, so that files of a killed pod are removed with it.

        Return nothing if the path is so long that unix sockets in it (at most 107 bytes) could not be created.
        """
        tmp = self.directory / "tmp"
        return {"TMPDIR": str(tmp)} if len(str(tmp)) <= LONGEST_TMP else {}

    def _plain_env(self) -> dict[str, str]:
        return {name: value for name, value in self._host_env.items() if not name.startswith("FAIRLEAD_")}


def record_pod(pod: Pod, service: str, component: str) -> PodRecord:
    """Return the state of a pod as a run's record has it."""
    return PodRecord(
        phase=pod.state.phase,
        reason=pod.state.reason,
        percent=pod.state.percent,
        ready=pod.state.ready,
        restarts=pod.state.restarts,
        name=pod.name,
        service=service,
        component=component,
        address=pod.address,
        log=str(pod.log),
    )


def describe_failure(pod: Pod) -> str:
    """Describe a failing pod: how it ended, the end of its log, and the log's path."""
    lines = "\n".join(f"    {line}" for line in pod.last_output()) or "    (nothing)"
    return f"pod {pod.name}: {pod.state.reason}, {pod.state.restarts} restarts. The end of its log:\n{lines}\n  whole log: {pod.log}"
