"""`fairlead console`: the web console of a local run, of the router at `--url`, or of a service of a cluster."""

import asyncio
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import httpx
import typer
from rich.console import Console

from fairlead.console import make_console
from fairlead.errors import UserError, check_http_url
from fairlead.kube.api import Kube
from fairlead.kube.command import ServiceOptions
from fairlead.kube.forward import PortForward, choose_router
from fairlead.local.rundir import RunRecord
from fairlead.local.up import run_until_stopped, stop_on_signals
from fairlead.options import takes
from fairlead.program import describe, new_app
from fairlead.tools.runs import NothingRuns, find_runs, services_of
from fairlead_operator import names

app = new_app()
SECONDS: Final = 10.0
PROBE: Final = "/ui/console.js"
"""A file of the console that needs no API key."""
_MANIFEST = 'set spec.routing.args: ["--console"] in its manifest'


@dataclass(frozen=True, kw_only=True)
class Options(ServiceOptions):
    """The options of `fairlead console`."""

    name: Annotated[str, typer.Argument(metavar="SERVICE", help="The service (default: the only one).")] = ""
    url: Annotated[str, typer.Option(metavar="U", help="A router, http://HOST:PORT (default: your runs on this machine).")] = ""
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False


@app.command(
    help=describe(
        "Print the URL of a service's web console. For a service of a cluster a port is forwarded until Ctrl-C, which ends with status 0.",
        "fairlead console",
        "fairlead console qwen -n team-a --open",
        "fairlead console --url http://127.0.0.1:8082",
    )
)
@takes(Options)
def run(options: Options) -> int:
    runs, console = find_runs(options, options.url), make_console()
    if runs is None:
        return _forward(options, console)
    if options.url:
        url, fix = check_http_url("--url", options.url), f"{_MANIFEST}, or start fairlead-router with --console"
    else:
        url, fix = find_local(runs, options.name), f"start `fairlead up` without --host, or {_MANIFEST}"
    check_console(url, fix)
    _show(console, url, options.open)
    return 0


def find_local(runs: Sequence[RunRecord], name: str) -> str:
    """Return the URL of a local service's router. Raises UserError if there is none, or several."""
    found = services_of(runs, name)
    if not found:
        raise NothingRuns(name)
    if len(found) > 1:
        raise UserError(f"several services run here: give the SERVICE, one of {', '.join(service for _, service, _ in found)}")
    record, _, url = found[0]
    if not record.has_router:
        raise UserError(f"`{record.command}` runs no router, which serves the console: start it with --replicas 2")
    return url


def check_console(url: str, fix: str) -> None:
    """Raise UserError if no console answers at `url`. `fix`: what to do if the router has none."""
    try:
        answer = httpx.get(f"{url}{PROBE}", timeout=SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"{url}: {str(error).rstrip('.')}. Check that a Fairlead router runs there") from None
    if answer.status_code == 404:
        raise UserError(f"{url}: the router has no web console: {fix}. (A worker or another server has none either.)")
    if answer.status_code != 200 or not answer.headers.get("content-type", "").startswith("text/javascript"):
        raise UserError(f"{url}: HTTP {answer.status_code}: not a Fairlead router's answer. Check the URL")


def _forward(options: Options, console: Console) -> int:
    """Forward a port to a router until a signal (status 0). Raises UserError, also when the forwarding ends."""
    kube = Kube.connect(options.kubeconfig, options.context)
    namespace = options.namespace or kube.namespace
    name = options.name or _only_service(kube, namespace)
    kube.service(namespace, name)
    path, selector = f"/api/v1/namespaces/{namespace}/pods", f"{names.MANAGED_BY}=fairlead,{names.INSTANCE}={name}"
    pod = choose_router(kube.items(path, right=f"list pods in namespace {namespace}", selector=selector), name)
    forward = PortForward(pod, names.ROUTER_ADMIN_PORT, namespace=namespace, context=options.context, kubeconfig=options.kubeconfig)

    async def follow() -> None:
        async with forward:
            await asyncio.to_thread(check_console, forward.url, f"{_MANIFEST}; its routers restart then")
            _show(console, forward.url, options.open)
            console.print(f"forwarded to pod {pod} of namespace {namespace} until Ctrl-C", style="dim", soft_wrap=True)
            await forward.wait()

    async def until_stopped() -> None:
        await run_until_stopped(follow(), stop_on_signals())

    asyncio.run(until_stopped())
    return 0


def _only_service(kube: Kube, namespace: str) -> str:
    found = sorted(str(one["metadata"]["name"]) for one in kube.services(namespace))
    if len(found) != 1:
        there = f"one of {', '.join(found[:20])}" if found else "there is none"
        raise UserError(f"namespace {namespace} has {len(found)} InferenceServices: give the SERVICE, {there} (-n selects a namespace)")
    return found[0]


def _show(console: Console, url: str, opens: bool) -> None:
    page = f"{url}/ui"
    console.print(page, markup=False, soft_wrap=True)
    if opens and not webbrowser.open(page):
        console.print("no browser was found: open the URL yourself", style="yellow")
