"""`fairlead up -f FILE`: run a manifest on this machine until Ctrl-C, and apply the file again when it changes."""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.local.cluster import LocalCluster, PodFailed, describe_failure
from fairlead.local.containers import LOOPBACK
from fairlead.local.manifest import Manifest, read_manifest
from fairlead.local.rundir import remove_old_runs
from fairlead.local.screen import Screen

FILE_CHECK_INTERVAL = 0.5
"""Seconds between two checks whether the manifest changed."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("up", help="run a manifest on this machine without a cluster: pods are processes")
    parser.add_argument(
        "-f",
        "--file",
        required=True,
        type=Path,
        metavar="FILE",
        help="manifest with one or more InferenceServices; edits are applied while it runs",
    )
    parser.add_argument(
        "-p", "--port", type=int, default=8080, metavar="P", help="port of the first router (default 8080); further services get P+1, …"
    )
    parser.add_argument(
        "--model-root",
        type=Path,
        metavar="DIR",
        help="models: pvc://CLAIM/PATH is DIR/CLAIM/PATH; file:///PATH is DIR/PATH if that exists",
    )
    parser.add_argument(
        "--ready-timeout", type=float, default=3600, metavar="S", help="seconds until all pods must be ready (default 3600)"
    )
    parser.add_argument(
        "--stop-grace",
        type=float,
        default=10,
        metavar="S",
        help="seconds for streams to end after Ctrl-C (default 10); Ctrl-C again: stop now",
    )
    parser.add_argument("--keep-files", action="store_true", help="keep logs and files of the run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.port <= 65535:
        raise UserError(f"--port {arguments.port}: must be 1 to 65535")
    if not arguments.ready_timeout > 0:  # written so that nan is refused too
        raise UserError(f"--ready-timeout {arguments.ready_timeout:g}: must be more than 0 seconds")
    if not arguments.stop_grace >= 0:
        raise UserError(f"--stop-grace {arguments.stop_grace:g}: must be 0 seconds or more")
    console = make_console()
    try:
        return asyncio.run(up(arguments, console))
    except PodFailed as error:
        console.print(f"{error}\n  Correct the error above, then start again. Nothing is left running.", markup=False, soft_wrap=True)
    except TimeoutError as error:
        console.print(f"{error} Nothing is left running.", markup=False, soft_wrap=True)
    return 1


async def up(arguments: argparse.Namespace, console: Console) -> int:
    manifest = read_manifest(arguments.file)
    if arguments.model_root and not arguments.model_root.is_dir():
        raise UserError(f"--model-root {arguments.model_root} is not a directory: give the one with the manifest's file:// paths")
    check_ports_free(arguments.port, len(manifest.services))
    stop = stop_on_signals()
    remove_old_runs()
    cluster = LocalCluster(
        manifest.services[0].name,
        port=arguments.port,
        host_env=dict(os.environ),
        cpus=os.cpu_count() or 1,
        model_root=arguments.model_root.absolute() if arguments.model_root else None,
        stop_grace=arguments.stop_grace,
        keep_files=arguments.keep_files,
        on_change=lambda: screen.update(),
    )
    screen = Screen(console, cluster.pods)
    async with cluster:
        console.print(f"logs: {cluster.directory}/logs", style="dim", soft_wrap=True)
        if manifest.skipped:
            console.print(f"skipped, because they need a cluster: {', '.join(manifest.skipped)}", style="dim", markup=False, soft_wrap=True)
        with screen:
            cluster.apply(manifest)
            status = await run_until_stopped(cluster.wait_ready(arguments.ready_timeout), stop)
        if not status:
            console.print("stopping")
            return 0
        print_urls(console, cluster.urls, manifest)
        screen.update()
        await run_until_stopped(follow(arguments.file, cluster, console), stop)
        console.print("stopping")
    return 0


async def follow(path: Path, cluster: LocalCluster, console: Console) -> None:
    """Apply the file again whenever it changes. For an invalid file print the error and change nothing. Never returns."""
    seen = file_stamp(path)
    failing: set[str] = set()
    while True:
        await asyncio.sleep(FILE_CHECK_INTERVAL)
        for pod in cluster.pods():
            if pod.state.phase == "CrashLoopBackOff" and f"{pod.name}/{pod.state.restarts}" not in failing:
                failing.add(f"{pod.name}/{pod.state.restarts}")
                console.print(describe_failure(pod), markup=False, soft_wrap=True)
        now = file_stamp(path)
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


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file, also if an editor replaces it; None while the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def print_urls(console: Console, urls: Mapping[str, str], manifest: Manifest) -> None:
    """Print each service's URL and an example request."""
    for service in manifest.services:
        url = urls[service.name]
        console.print(f"\n[bold green]ready[/]  {url}/v1   model {service.served_model_name}", soft_wrap=True)
        key = " -H 'Authorization: Bearer KEY'" if service.spec.access else ""
        body = f'{{"model": "{service.served_model_name}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'
        request = f"curl -s {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
        console.print(f"  {request}", markup=False, soft_wrap=True)
    console.print("  to scale: edit spec.replicas in the file · to stop: Ctrl-C\n", style="dim", markup=False)


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


def check_ports_free(first: int, count: int) -> None:
    """Raise UserError if a port is in use, before a router fails with a message in its log only."""
    if first + count - 1 > 65535:
        raise UserError(f"--port {first}: {count} services need the ports up to {first + count - 1}; choose at most {65536 - count}")
    for port in range(first, first + count):
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise UserError(f"--port {first}: port {port} cannot be used ({error.strerror}); choose another") from None


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
