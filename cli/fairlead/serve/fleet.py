"""What `fairlead serve` runs: one worker process, or the local cluster of a manifest made here."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote

from fairlead.errors import UserError
from fairlead.local.cluster import LocalCluster, record_pod
from fairlead.local.containers import LOOPBACK, Container, Probe
from fairlead.local.kubelet import find_program
from fairlead.local.manifest import Manifest
from fairlead.local.pod import Pod
from fairlead.local.process import Guard
from fairlead.local.rundir import RunRecord, make_run_directory, remove_run_directory, write_record
from fairlead.local.usage import curl_command
from fairlead.serve.options import Runtime
from fairlead_operator.api import InferenceService, InvalidManifest

RUNTIMES = {"vllm": "VLLM", "sglang": "SGLang"}
"""Value of `spec.engine.runtime`."""
SERVICE, POD = "serve", "worker"
"""Names in `fairlead status`."""
UNUSABLE = frozenset('%#?"')
"""Characters of a path that its file:// URI would have to encode."""
CLOSING_SECONDS = 5.0
"""Seconds from the end of a worker's drain, which sends the last event of each stream, to its own end."""


class LocalWorker:
    """One worker and no router, as an async context manager. The pod restarts the worker if it dies."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        record: RunRecord,
        port: int,
        host_env: Mapping[str, str],
        stop_grace: float,
        on_change: Callable[[], None],
    ) -> None:
        self.directory = make_run_directory("serve")
        self._record = record
        self._on_change = on_change
        self._stop_grace = stop_grace
        self._guard = Guard()
        termination_log = self.directory / "worker.termination"
        # The user's flags follow ours, and the last one wins.
        ours = ("--host", LOOPBACK, "--port", str(port), "--drain-timeout", f"{stop_grace:g}")
        variables = {
            "FAIRLEAD_POD_NAME": POD,
            "FAIRLEAD_ADVERTISE": f"{LOOPBACK}:{port}",
            "FAIRLEAD_TERMINATION_LOG": str(termination_log),
            "FAIRLEAD_ADMIN_PORT": "",
            "PYTHONUNBUFFERED": "1",
        }
        container = Container(
            command=(*find_program((), "worker"), *ours, *flags),
            env={**host_env, **variables},
            port=port,
            readiness=Probe("/ready", port),
            liveness=Probe("/livez", port, timeout=5.0),
        )
        self._pod = Pod(
            POD,
            container,
            log=self.directory / "logs" / "worker.log",
            termination_log=termination_log,
            guard=self._guard,
            changed=self._on_pod_change,
        )

    async def __aenter__(self) -> "LocalWorker":
        self._guard.__enter__()
        self._write_pod()  # so that no later run removes the directory
        self._pod.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self._pod.stop(self._stop_grace + CLOSING_SECONDS)
        finally:
            self._guard.__exit__(kind, error, trace)
        if error is None:  # otherwise its log may be read
            await remove_run_directory(self.directory)

    def _on_pod_change(self) -> None:
        self._write_pod()
        self._on_change()

    def _write_pod(self) -> None:
        write_record(self.directory, replace(self._record, pods=[record_pod(self._pod, SERVICE, "worker")]))

    def pods(self) -> list[Pod]:
        return [self._pod]

    def is_ready(self) -> bool:
        return self._pod.state.ready


class LocalFleet(LocalCluster):
    """Workers behind a router with a prefix index: a local cluster that applies its only manifest itself."""

    def __init__(
        self, manifest: Manifest, *, port: int, host_env: Mapping[str, str], stop_grace: float, on_change: Callable[[], None]
    ) -> None:
        grace = stop_grace + CLOSING_SECONDS
        super().__init__(SERVICE, port=port, host_env=host_env, cpus=os.cpu_count() or 1, stop_grace=grace, on_change=on_change)
        self._only_manifest = manifest

    async def __aenter__(self) -> "LocalFleet":
        await super().__aenter__()
        try:
            self.apply(self._only_manifest)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self


def make_record(command: str, name: str, port: int, key_file: str) -> RunRecord:
    """Return what `fairlead status` shows of one worker. `name`: the model's name in the API. `key_file`: its API keys; empty: none."""
    url = f"http://{LOOPBACK}:{port}"
    return RunRecord(
        pid=os.getpid(),
        command=command,
        urls={SERVICE: url},
        replicas={SERVICE: 1},
        models={SERVICE: name},
        calls={SERVICE: curl_command(url, name, needs_key=bool(key_file))},
        has_router=False,
        secret_file=str(Path(key_file).absolute()) if key_file else "",
    )


def make_manifest(
    command: str, uri: str, name: str, replicas: int, flags: Sequence[str], stop_grace: float, runtime: Runtime = "fairlead"
) -> Manifest:
    """Return the manifest of `replicas` workers of a model. `name`: the model's name in the API. Raises UserError."""
    folder = unquote(uri.removeprefix("file://")) if uri.startswith("file://") else ""
    if set(folder) & UNUSABLE:
        raise UserError(f"with --replicas {replicas}: the path {folder} has one of {' '.join(sorted(UNUSABLE))}: rename it, or link to it")
    document = {
        "metadata": {"name": SERVICE},
        "spec": {
            "model": {"uri": "file:///folder" if folder else uri, "name": name},
            "replicas": replicas,
            "rollout": {"drainTimeoutSeconds": int(stop_grace)},
            **({"engine": {"runtime": RUNTIMES[runtime], "image": "local"}} if runtime != "fairlead" else {}),
        },
    }
    try:
        service = InferenceService.parse(document)
    except InvalidManifest as error:
        raise UserError(f"with --replicas {replicas}: {error}") from None
    # Not in the document, which refuses flags such as --served-model-name: `worker_config` has checked these as it does for one worker.
    # It also refuses paths that need quotes in a manifest.
    engine = service.spec.engine.model_copy(update={"args": list(flags)})
    model = service.spec.model.model_copy(update={"uri": f"file://{folder}"} if folder else {})
    spec = service.spec.model_copy(update={"engine": engine, "model": model})
    return Manifest(command, (replace(service, spec=spec),))
