"""`kubectl-fairlead`: kubectl runs it for `kubectl fairlead …` when it is on the PATH."""

import argparse
from collections.abc import Sequence

from fairlead.errors import run_command
from fairlead.kube import command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kubectl fairlead", description="InferenceServices of a cluster: what they do, and why they do not."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = commands.add_parser("status", help="one table of services and pods; exit 1 while one is not ready")
    command.add_status(status)
    status.set_defaults(run=command.run_status)
    command.add_top_parser(commands)
    command.add_explain_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. The exit statuses are those of `fairlead`."""
    run_command(build_parser(), argv)
