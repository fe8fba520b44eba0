"""`fairlead up -f FILE`: run a manifest on this machine until Ctrl-C, and apply the file again when it changes."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.local.cluster import LocalCluster, PodFailed, describe_failure
from fairlead.local.containers import LOOPBACK
from fairlead.local.manifest import Manifest, read_manifest
from fairlead.local.rundir import remove_old_runs, running
from fairlead.local.screen import Screen
from fairlead.local.usage import curl_command
from fairlead.options import takes
from fairlead.program import describe, new_app

EVERYWHERE = "0.0.0.0"
FILE_CHECK_INTERVAL = 0.5
"""Seconds between two checks whether the manifest changed."""
WAITING = "fairlead_router_queued_requests"
"""The router's metric of requests that wait, also those that wait for a first worker."""
MISSING_CHECKS = 3
"""A file is reported as deleted after this many checks: editors delete and create a file when they save."""


app = new_app()


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The options of `fairlead up`."""

    file: Annotated[
        Path, typer.Option("--file", "-f", metavar="FILE", help="Manifest with InferenceServices; edits are applied while it runs.")
    ]
    port: Annotated[int, typer.Option("--port", "-p", metavar="P", help="Port of the first router; further services get P+1, ….")] = 8080
    host: Annotated[str, typer.Option(metavar="ADDR", help="Address of the routers; 0.0.0.0 also serves other machines.")] = LOOPBACK
    model_root: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Models: pvc://CLAIM/PATH is DIR/CLAIM/PATH; file:///PATH is DIR/PATH if that exists."),
    ] = None
    ready_timeout: Annotated[float, typer.Option(metavar="S", help="Seconds until all pods must be ready.")] = 3600
    stop_grace: Annotated[float, typer.Option(metavar="S", help="Seconds for streams to end after Ctrl-C; Ctrl-C again: stop now.")] = 10
    keep_files: Annotated[bool, typer.Option("--keep-files", help="Keep logs and files of the run.")] = False


@app.command(
    help=describe(
        "Run a manifest on this machine without a cluster: pods are processes on loopback, Redis is embedded.",
        "fairlead up -f examples/demo.yaml --model-root ~/.cache/fairlead/demo",
        "fairlead up -f qwen.yaml --port 9000 --host 0.0.0.0",
    )
)
@takes(UpOptions)
def run(options: UpOptions) -> int:
    if not 1 <= options.port <= 65535:
        raise UserError(f"--port {options.port}: must be 1 to 65535")
    if options.host not in (LOOPBACK, EVERYWHERE):
        raise UserError(f"--host {options.host}: must be {LOOPBACK} (this machine only) or {EVERYWHERE} (all addresses)")
    if not options.ready_timeout > 0:  # written so that nan is refused too
        raise UserError(f"--ready-timeout {options.ready_timeout:g}: must be more than 0 seconds")
    if not options.stop_grace >= 0:
        raise UserError(f"--stop-grace {options.stop_grace:g}: must be 0 seconds or more")
    console = make_console()
    try:
        return asyncio.run(up(options, console))
    except PodFailed as error:
        console.print(f"{error}\n  Correct the error above, then start again. Nothing is left running.", markup=False, soft_wrap=True)
    except TimeoutError as error:
        console.print(f"{error} Nothing is left running.", markup=False, soft_wrap=True)
    return 1


async def up(options: UpOptions, console: Console) -> int:
    manifest = read_manifest(options.file)
    if options.model_root and not options.model_root.is_dir():
        raise UserError(f"--model-root {options.model_root} is not a directory: give the one with the manifest's file:// paths")
    check_ports_free(options.port, len(manifest.services), options.host)
    stop = stop_on_signals()
    remove_old_runs()
    cluster = LocalCluster(
        manifest.services[0].name,
        port=options.port,
        host=options.host,
        host_env=dict(os.environ),
        cpus=os.cpu_count() or 1,
        model_root=options.model_root.absolute() if options.model_root else None,
        stop_grace=options.stop_grace,
        keep_files=options.keep_files,
        on_change=lambda: screen.update(),
    )
    screen = Screen(console, cluster.pods)
    async with cluster:
        console.print(f"logs: {cluster.directory}/logs", style="dim", soft_wrap=True)
        if manifest.skipped:
            console.print(f"skipped, because they need a cluster: {', '.join(manifest.skipped)}", style="dim", markup=False, soft_wrap=True)
        with screen:
            cluster.apply(manifest)
            status = await run_until_stopped(cluster.wait_ready(options.ready_timeout), stop)
        if not status:
            console.print("stopping")
            return 0
        print_urls(console, cluster.urls, manifest, has_console=options.host == LOOPBACK)
        print_zero(console, cluster.idle)
        if options.host == EVERYWHERE:
            console.print(f"  {EVERYWHERE}: other machines reach this port too, also its admin paths (/fairlead, /metrics)", style="yellow")
        screen.update()
        await run_until_stopped(follow(options.file, cluster, console), stop)
        console.print("stopping")
    return 0


async def follow(path: Path, cluster: LocalCluster, console: Console) -> None:
    """Apply the file again whenever it changes. For an invalid file print the error and change nothing. Never returns."""
    seen = file_stamp(path)
    failing: set[str] = set()
    missing = 0
    while True:
        await asyncio.sleep(FILE_CHECK_INTERVAL)
        for pod in cluster.pods():
            if pod.state.phase == "CrashLoopBackOff" and f"{pod.name}/{pod.state.restarts}" not in failing:
                failing.add(f"{pod.name}/{pod.state.restarts}")
                console.print(describe_failure(pod), markup=False, soft_wrap=True)
        for name in [name for name in cluster.idle if await has_waiting_requests(cluster.urls[name], cluster.credential)]:
            cluster.wake(name)
            console.print(f"{name}: a request waits, so one worker starts; it runs until the file changes", soft_wrap=True)
        now = file_stamp(path)
        missing = missing + 1 if now is None else 0
        if missing == MISSING_CHECKS:
            console.print(f"{path} was deleted or moved; the running pods stay as they are. Put it back to change them.", style="yellow")
        if now == seen or now is None:
            continue
        seen = now
        try:
            cluster.apply(read_manifest(path))
        except UserError as error:
            console.print(
                f"{error}\n  the file was not applied; the running pods stay as they are", style="red", markup=False, soft_wrap=True
            )
        else:
            console.print(f"{path} has changed: applied", soft_wrap=True)
            print_zero(console, cluster.idle)


async def has_waiting_requests(router_url: str, headers: Mapping[str, str]) -> bool:
    """Return whether requests wait in the router; False if it does not answer."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=1.0) as client:
            text = (await client.get(f"{router_url}/metrics", headers=headers)).text
    except httpx.HTTPError:
        return False
    return any(line.startswith(f"{WAITING} ") and float(line.split()[1]) > 0 for line in text.splitlines())


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file, also if an editor replaces it; None while the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def print_urls(console: Console, urls: Mapping[str, str], manifest: Manifest, *, has_console: bool = True) -> None:
    """Print each service's URL, an example request, and the URL of the web console."""
    for service in manifest.services:
        url = urls[service.name]
        console.print(f"\n[bold green]ready[/]  {url}/v1   model {service.served_model_name}", soft_wrap=True)
        call = curl_command(url, service.served_model_name, needs_key=service.spec.access is not None)
        console.print(f"  {call}", markup=False, soft_wrap=True)
        if has_console:
            console.print(f"  console: {url}/ui", markup=False, soft_wrap=True)
    console.print("  to scale: edit spec.replicas in the file · to stop: Ctrl-C\n", style="dim", markup=False)


def print_zero(console: Console, services: Sequence[str]) -> None:
    """Say which services have no worker."""
    for name in services:
        console.print(f"{name}: spec.replicas is 0, so no worker runs; the next request starts one", style="yellow", soft_wrap=True)


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGINT, SIGTERM and SIGHUP set. A second signal ends this process; its guard ends the pods."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return stop


def check_ports_free(first: int, count: int, host: str = LOOPBACK) -> None:
    """Raise UserError if a port is in use, before a router fails with a message in its log only."""
    if first + count - 1 > 65535:
        raise UserError(f"--port {first}: {count} services need the ports up to {first + count - 1}; choose at most {65536 - count}")
    for port in range(first, first + count):
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                user = next((run for run in running() if any(url.endswith(f":{port}") for url in run.urls.values())), None)
                why = f"`{user.command}` (process {user.pid}) uses it" if user else str(error.strerror)
                raise UserError(f"--port {first}: port {port} cannot be used: {why}. Choose another, as --port {port + count}") from None


async def run_until_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Run `work` until it ends (True) or `stop` is set (False, and `work` is cancelled). Its exceptions are raised."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
