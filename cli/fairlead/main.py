"""The `fairlead` command. Each subcommand has its own folder. Importing it is cheap: heavy imports wait until it runs."""

import argparse
from collections.abc import Sequence

from fairlead.bench import command as bench
from fairlead.chat import command as chat
from fairlead.demo import command as demo
from fairlead.errors import run_command
from fairlead.keys import command as keys
from fairlead.kube import command as kube
from fairlead.local import up
from fairlead.random_model import command as make_model
from fairlead.schedule import command as schedule
from fairlead.serve import command as serve
from fairlead.simulate import command as simulate
from fairlead.tools import doctor, status, verify


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fairlead", description="Kubernetes-native LLM inference: local mode, benchmarks and tools.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, chat, up, demo, status, verify, bench, simulate, schedule, make_model, keys, doctor):
        module.add_parser(commands)
    kube.add_top_parser(commands)
    kube.add_explain_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. Exit status: 0 success, 1 the command failed, 2 wrong argument or manifest, 130 interrupted."""
    run_command(build_parser(), argv)
