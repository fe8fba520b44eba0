"""`fairlead demo`: a model, two workers, a router, three conversations, with steering and without; ends by itself."""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fairlead.console import make_console
from fairlead.demo.compare import PROMISED_SHARE, broken_promises, side_by_side, summary
from fairlead.demo.conversations import conversations
from fairlead.demo.play import Turn, TurnFailed, play
from fairlead.errors import UserError
from fairlead.local.cluster import LocalCluster, PodFailed
from fairlead.local.kubelet import free_port
from fairlead.local.manifest import Manifest, read_manifest
from fairlead.local.screen import Screen
from fairlead.local.up import first_of, stop_on_signals
from fairlead_operator.api.spec import Routing

MODEL = ("--arch", "qwen3", "--hidden", "512", "--layers", "6", "--heads", "8", "--intermediate", "1536", "--max-positions", "4096")
"""Large enough that prefill shows on two cores, small enough that the demo ends within a minute and a half."""
MANIFEST = Path(__file__).with_name("demo.yaml")
"""Beside this file so that a wheel has it; `examples/demo.yaml` is a copy, to be edited."""
MODEL_PATH = "models/demo"
"""Under the model root; `spec.model.uri` of the manifest."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("demo", help="two workers, a router, three conversations, with and without steering; ends by itself")
    parser.add_argument("--model-root", type=Path, metavar="DIR", help="where the demo's model is kept (default: ~/.cache/fairlead/demo)")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="port of the router (default: a free one)")
    parser.add_argument("--ready-timeout", type=float, default=600, metavar="S", help="seconds for the workers to load (default 600)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    began = time.monotonic()
    try:
        status = asyncio.run(demo(arguments, console))
    except (PodFailed, TurnFailed, TimeoutError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(f"[dim]{time.monotonic() - began:.0f} s in all; nothing is left running[/]")
    return status


async def demo(arguments: argparse.Namespace, console: Console) -> int:
    root = make_demo_model(arguments.model_root or default_root(), console)
    steered = read_manifest(MANIFEST)
    stop = stop_on_signals()
    cluster = LocalCluster(
        "demo",
        port=arguments.port or free_port(set()),
        host_env=dict(os.environ),
        cpus=os.cpu_count() or 1,
        model_root=root,
        on_change=lambda: screen.update(),
    )
    screen = Screen(console, cluster.pods)
    runs: list[list[Turn]] = []

    async def both() -> None:
        for manifest in (steered, with_policy(steered, "Random")):
            runs.append(await hold(cluster, manifest, screen, console, arguments.ready_timeout))

    async with cluster:
        if not await first_of(both(), stop):
            console.print("stopped")
            return 130
    console.print(side_by_side(*runs))
    console.print(summary(*runs), markup=False)
    broken = broken_promises(runs[0])
    for sentence in broken:
        console.print(f"not kept: {sentence}", style="red", markup=False)
    if not broken:
        console.print(
            f"[green]kept:[/] with PrefixAware every turn after the first went back to its pod and found over {PROMISED_SHARE:.0%} cached"
        )
    return 1 if broken else 0


async def hold(cluster: LocalCluster, manifest: Manifest, screen: Screen, console: Console, timeout: float) -> list[Turn]:
    """Apply `manifest`, wait for it, and hold the three conversations through its router."""
    service = manifest.services[0]
    policy = service.spec.routing.policy
    with screen:
        cluster.apply(manifest)
        await cluster.wait_ready(timeout)
    began = time.monotonic()
    people = conversations(f"{policy} {os.getpid()}")
    with console.status(f"{policy}: {len(people)} conversations at once") as status:
        turns = await play(
            cluster.urls[service.name],
            service.served_model_name,
            people,
            lambda turn: status.update(f"{policy}: {turn.conversation}, turn {turn.number} from {turn.pod}"),
        )
    console.print(f"{policy}: {len(turns)} turns of {len(people)} conversations in {time.monotonic() - began:.1f} s")
    return turns


def with_policy(manifest: Manifest, policy: str) -> Manifest:
    """The same services with another `spec.routing.policy`: only the router is replaced."""

    def changed(routing: Routing) -> Routing:
        return Routing.model_validate(routing.model_dump() | {"policy": policy})

    services = tuple(
        replace(service, spec=service.spec.model_copy(update={"routing": changed(service.spec.routing)})) for service in manifest.services
    )
    return replace(manifest, services=services)


def make_demo_model(root: Path, console: Console) -> Path:
    """Make the model under `root` unless it is there. In a process of its own: torch must not stay in this one's memory."""
    command: Sequence[str] = (sys.executable, "-m", "fairlead", "make-model", str(root / MODEL_PATH), *MODEL)
    with console.status("making a model"):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UserError(f"making the demo's model failed:\n{made.stderr.strip()}")
    console.print(made.stdout.strip(), style="dim", markup=False, soft_wrap=True)
    return root


def default_root() -> Path:
    """`~/.cache/fairlead/demo`, or a temporary directory where the home cannot be written."""
    root = Path.home() / ".cache" / "fairlead" / "demo"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"fairlead-demo-{os.getuid()}"
    return root
