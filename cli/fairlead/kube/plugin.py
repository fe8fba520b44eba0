"""`kubectl-fairlead`: kubectl runs it for `kubectl fairlead …` when it is on the PATH."""

from collections.abc import Sequence

from fairlead.kube.command import ExplainOptions, StatusOptions, TopOptions, run_explain, run_status, run_top
from fairlead.kube.outdated import OutdatedOptions, run_outdated
from fairlead.options import takes
from fairlead.program import Command, describe, make_program, new_app, run_program

status, top, explain, outdated = new_app(), new_app(), new_app(), new_app()
status.command(help=describe("One table of services and pods; exit status 1 while one is not ready.", "kubectl fairlead status -A"))(
    takes(StatusOptions)(run_status)
)
top.command(help=describe("Live load of services and pods.", "kubectl fairlead top -n team-a"))(takes(TopOptions)(run_top))
explain.command(help=describe("Why a service is not ready, and what to do next.", "kubectl fairlead explain qwen -n team-a"))(
    takes(ExplainOptions)(run_explain)
)
outdated.command(
    help=describe("Services that do not run the newest images or revision, and why; exit status 1 if any.", "kubectl fairlead outdated -A")
)(takes(OutdatedOptions)(run_outdated))

COMMANDS = (
    Command("status", "fairlead.kube.plugin:status", "Commands", "One table of services and pods; exit status 1 while one is not ready."),
    Command("top", "fairlead.kube.plugin:top", "Commands", "Live load of services and pods."),
    Command("explain", "fairlead.kube.plugin:explain", "Commands", "Why a service is not ready, and what to do next."),
    Command("outdated", "fairlead.kube.plugin:outdated", "Commands", "Services that do not run the newest images or revision, and why."),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. The exit statuses are those of `fairlead`."""
    run_program(
        make_program("InferenceServices of a cluster: their state, and why they are not ready.", COMMANDS, completes=False),
        "kubectl fairlead",
        argv,
    )
