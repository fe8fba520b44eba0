"""One run of `fairlead serve`: start, show the progress, say how to call it, and wait for Ctrl-C."""

import asyncio
import os
import shlex
import time
from collections.abc import Callable

from rich.console import Console

from fairlead.local.cluster import PodFailed, describe_failure
from fairlead.local.containers import LOOPBACK
from fairlead.local.pod import Pod
from fairlead.local.rundir import remove_old_runs
from fairlead.local.up import check_ports_free, run_until_stopped, stop_on_signals
from fairlead.local.usage import curl_command
from fairlead.serve import DEFAULT_URL
from fairlead.serve.download import download
from fairlead.serve.fleet import LocalFleet, LocalWorker, make_manifest, make_record
from fairlead.serve.model import Served, find_model, find_served
from fairlead.serve.options import ServeOptions
from fairlead.serve.progress import StartUpProgress

WORKER_PREFIX = "fairlead-worker: "
"""How the line with the reason of a worker's failure begins."""


async def serve(options: ServeOptions, console: Console) -> int:
    """Serve until a signal, and return 0. Raises UserError for wrong options, ModelRefused and PodFailed."""
    began = time.monotonic()
    options.check()
    uri = find_model(options.model)
    served = find_served(options, uri)
    check_ports_free(options.port, 1)
    stop = stop_on_signals()
    remove_old_runs()
    if options.replicas > 1 and uri.startswith("oci://"):

        async def fetch() -> None:
            nonlocal uri
            uri = await download(uri, served.model_cache, console)

        if not await run_until_stopped(fetch(), stop):
            console.print("stopping")
            return 0
    changed = asyncio.Event()

    def on_change() -> None:
        changed.set()
        progress.update()

    fleet = _make_fleet(options, uri, served, on_change)
    progress = StartUpProgress(console, fleet.pods)
    async with fleet:
        console.print(f"logs: {fleet.directory}/logs", style="dim", soft_wrap=True)
        with progress:
            if not await run_until_stopped(_wait_ready(fleet, changed), stop):
                console.print("stopping")
                return 0
        console.print(f"\n[bold green]ready[/] after {time.monotonic() - began:.1f} s", soft_wrap=True)
        url = f"http://{LOOPBACK}:{options.port}"
        print_usage(console, url, served.name, needs_key=bool(served.key_file), has_console=isinstance(fleet, LocalFleet))
        await run_until_stopped(_report_failures(fleet, changed, console), stop)
        console.print("stopping; Ctrl-C again: stop now")
    return 0


def _make_fleet(options: ServeOptions, uri: str, served: Served, on_change: Callable[[], None]) -> LocalWorker | LocalFleet:
    port, grace, flags = options.port, options.stop_grace, options.flags or []
    command = shlex.join(["fairlead", "serve", options.model])
    if options.replicas == 1 and options.runtime == "fairlead":
        record = make_record(command, served.name, port, served.key_file)
        worker_flags = ("--model", uri, *flags)
        return LocalWorker(worker_flags, record=record, port=port, host_env=os.environ, stop_grace=grace, on_change=on_change)
    manifest = make_manifest(command, uri, served.name, options.replicas, flags, grace, options.runtime)
    return LocalFleet(manifest, port=port, host_env=os.environ, stop_grace=grace, on_change=on_change)


async def _wait_ready(fleet: LocalWorker | LocalFleet, changed: asyncio.Event) -> None:
    """Wait until all pods are ready. Raises PodFailed as soon as one ends: nothing that a restart could mend has happened yet."""
    while not fleet.is_ready():
        for pod in fleet.pods():
            if pod.state.restarts:
                raise PodFailed(describe_end(pod))
        changed.clear()
        await changed.wait()


async def _report_failures(fleet: LocalWorker | LocalFleet, changed: asyncio.Event, console: Console) -> None:
    """Print why a pod ended, each time. Pods restart by themselves. Never returns."""
    seen: dict[str, int] = {}
    while True:
        for pod in fleet.pods():
            if pod.state.restarts > seen.get(pod.name, 0):
                seen[pod.name] = pod.state.restarts
                console.print(f"{describe_end(pod)}; it restarts", style="red", markup=False, soft_wrap=True)
        changed.clear()
        await changed.wait()


def describe_end(pod: Pod) -> str:
    """Return the reason that a worker gave for its end, in one line; without one, the end of its log."""
    lines = pod.last_output()
    reasons = [line.removeprefix(WORKER_PREFIX) for line in lines if line.startswith(WORKER_PREFIX)] or lines
    return f"{reasons[0]} (log: {pod.log})" if len(reasons) == 1 else describe_failure(pod)


def print_usage(console: Console, url: str, model: str, *, needs_key: bool, has_console: bool) -> None:
    """Print how to call the model: a command to paste, and the chat. Only a router has the web console."""
    curl = curl_command(url, model, needs_key=needs_key)
    chat = "fairlead chat" + ("" if url == DEFAULT_URL else f" --url {url}") + (" --api-key-file FILE" if needs_key else "")
    page = f"\n  pages  {url}/ui" if has_console else ""
    console.print(f"  model  {model} at {url}/v1\n  stop   Ctrl-C\n  call   {curl}{page}\n  chat   {chat}", markup=False, soft_wrap=True)
