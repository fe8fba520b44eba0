"""`kubectl-fairlead`: kubectl runs it for `kubectl fairlead …` when it is on the PATH."""

from collections.abc import Sequence

from fairlead.kube.command import ExplainOptions, StatusOptions, TopOptions, run_explain, run_status, run_top
from fairlead.kube.outdated import OutdatedOptions, run_outdated
from fairlead.options import takes
from fairlead.program import Command, describe, make_program, new_app, run_program

SUMMARIES = {
    "status": "One table of services and pods; exit status 1 while one is not ready.",
    "top": "Live load of services and pods.",
    "explain": "Why a service is not ready, and what to do next.",
    "outdated": "Services that do not run the newest images or revision, and why; exit status 1 if any.",
}
COMMANDS = [Command(name, f"fairlead.kube.plugin:{name}", "Commands", summary) for name, summary in SUMMARIES.items()]

status, top, explain, outdated = new_app(), new_app(), new_app(), new_app()
status.command(help=describe(SUMMARIES["status"], "kubectl fairlead status -A"))(takes(StatusOptions)(run_status))
top.command(help=describe(SUMMARIES["top"], "kubectl fairlead top -n team-a"))(takes(TopOptions)(run_top))
explain.command(help=describe(SUMMARIES["explain"], "kubectl fairlead explain qwen -n team-a"))(takes(ExplainOptions)(run_explain))
outdated.command(help=describe(SUMMARIES["outdated"], "kubectl fairlead outdated -A"))(takes(OutdatedOptions)(run_outdated))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. The exit statuses are those of `fairlead`."""
    program = make_program("InferenceServices of a cluster: their state, and why they are not ready.", COMMANDS, completes=False)
    run_program(program, "kubectl fairlead", argv)
