"""`kubectl fairlead outdated`: services with pods that do not run the newest images or the desired revision, and why."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape

from fairlead.console import fit_table, make_console
from fairlead.kube.api import Kube
from fairlead.options import AllNamespaces, Context, Kubeconfig, Namespace, Output, print_data

Body = Mapping[str, Any]
_OPTIONAL = ("PODS", "NEWEST")
"""Columns that a narrow terminal leaves out, the first first."""


@dataclass(frozen=True, kw_only=True)
class OutdatedOptions:
    """The options of `outdated`."""

    namespace: Namespace = ""
    all_namespaces: AllNamespaces = False
    context: Context = ""
    kubeconfig: Kubeconfig = ""
    output: Output = "table"


@dataclass(frozen=True)
class Outdated:
    """One component of one service that is outdated."""

    namespace: str
    name: str
    component: str  # worker or router
    image: str  # that its pods run; several, with commas, while they are replaced
    newest: str
    revision: str  # the desired one
    pods: str  # pods of the desired revision / all
    reason: str
    message: str


def find_outdated(services: Iterable[Body]) -> list[Outdated]:
    """Return the outdated components, from the status that the operator wrote."""
    return [one for body in services for one in _of_service(body)]


def _of_service(body: Body) -> Iterator[Outdated]:
    metadata, status = body["metadata"], body.get("status") or {}
    update, revisions = status.get("imageUpdate") or {}, status.get("revisions") or []
    for component in ("worker", "router"):
        mine = [one for one in revisions if one["component"] == component]
        running = [one for one in mine if one.get("replicas")] or mine
        images = sorted({one.get("image", "") for one in running})
        newest = update.get(f"{component}Image", "")
        behind = bool(newest) and images != [newest] and update.get("phase") != "Current"
        old = [one for one in running if not one.get("desired")]
        if not (mine and (behind or old)):
            continue
        desired: Body = next((one for one in mine if one.get("desired")), {})
        total = sum(one.get("replicas", 0) for one in mine)
        reason, message = _explain(status, by_image=behind)
        yield Outdated(
            metadata["namespace"],
            metadata["name"],
            component,
            ", ".join(images),
            newest if behind else desired.get("image", ""),
            desired.get("name", ""),
            f"{desired.get('replicas', 0)}/{total}",
            reason,
            message,
        )


def _explain(status: Body, *, by_image: bool) -> tuple[str, str]:
    """Return reason and message: of condition UpToDate, and of Progressing where only the revision is outdated."""
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    found = conditions.get("UpToDate" if by_image else "Progressing") or {}
    return found.get("reason", "Unknown"), found.get("message", "")


def run_outdated(options: OutdatedOptions) -> int:
    """Print what is outdated. Return 0 if nothing is, else 1."""
    kube = Kube.connect(options.kubeconfig, options.context)
    namespace = "" if options.all_namespaces else options.namespace or kube.namespace
    rows = find_outdated(kube.services(namespace))
    if options.output != "table":
        print_data([asdict(row) for row in rows], options.output)
        return 1 if rows else 0
    console = make_console()
    if not rows:
        console.print(f"every service{f' in namespace {namespace}' if namespace else ''} runs the newest images and its desired revision")
        return 0
    headers = ["NAMESPACE", "NAME", "COMPONENT", "REASON", "IMAGE", "NEWEST", "PODS"]
    lines = [[row.namespace, row.name, row.component, row.reason, row.image, row.newest, row.pods] for row in rows]
    escaped = [[escape(cell) for cell in line] for line in lines]
    console.print(fit_table(headers, escaped, left=6, width=console.width, optional=_OPTIONAL))
    for message in dict.fromkeys(f"{row.namespace}/{row.name}: {row.message}" for row in rows if row.message):
        console.print(escape(message), style="yellow", highlight=False, soft_wrap=True)
    return 1
