"""The `fairlead` command. Each subcommand lives in its own folder and is imported cheaply; heavy imports wait until it runs."""

import argparse
import sys
from collections.abc import Sequence

from fairlead.bench import command as bench
from fairlead.errors import UserError
from fairlead.local import up
from fairlead.random_model import command as make_model


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fairlead", description="Kubernetes-native LLM inference: local mode, benchmarks and tools.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (up, bench, make_model):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status: 0 done, 1 the command ran and failed, 2 a wrong argument or manifest, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
    except UserError as error:
        print(f"fairlead {arguments.command}: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
