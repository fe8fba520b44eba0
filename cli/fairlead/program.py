"""How a command line is put together: a Typer group whose subcommands are imported only when they run.

To add a command: write a module with `app = new_app()` and one `@app.command(...)` function (or several, for a group of subcommands), which
returns the exit status, and add one `Command` line to `COMMANDS` in `fairlead.main`. Its module is not imported for `fairlead --help`.
"""

import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from fairlead.errors import PipeClosed, UserError

EXIT_STATUSES = (
    "Exit status: 0 success, 1 the command failed or what it checks is not ready, 2 wrong argument, manifest or server, 130 Ctrl-C."
)


@dataclass(frozen=True)
class Command:
    """A subcommand. `app`: `module:attribute` of its Typer. `panel`: the heading below which `--help` lists it."""

    name: str
    app: str
    panel: str
    summary: str


def new_app(**settings: Any) -> typer.Typer:
    """Return the Typer of one command, or of a group of subcommands."""
    return typer.Typer(add_completion=False, rich_markup_mode="rich", no_args_is_help=True, **settings)


def describe(text: str, *examples: str) -> str:
    """Return the help of a command: its description, then examples, one a line."""
    lines = "\n".join(f"  {example}".replace("[", "\\[") for example in examples)
    return f"{text}\n\n[bold]Examples[/]\n\n\b\n{lines}" if examples else text


def make_program(summary: str, commands: Sequence[Command], *, completes: bool = True) -> Any:
    """Return the click command of a program with these subcommands, `--version`, and if it `completes`, shell completion."""
    by_name = {command.name: command for command in commands}

    class Group(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            """Add a placeholder for each command, which has its help only."""
            super().__init__(**settings)
            for each in commands:
                self.add_command(TyperCommand(each.name, short_help=each.summary, help=each.summary, rich_help_panel=each.panel))

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return name, load_command(by_name[command.name or ""]) if command else None, rest

    program = typer.Typer(
        cls=Group,
        add_completion=completes,
        help=summary,
        epilog=EXIT_STATUSES,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @program.callback(invoke_without_command=True)
    def root(
        ctx: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
        ] = False,
    ) -> None:
        if ctx.invoked_subcommand is None:
            ctx.get_help()  # prints it

    return typer.main.get_command(program)


def load_command(command: Command) -> Any:
    """Import the command's module and return its click command."""
    module, _, attribute = command.app.partition(":")
    loaded = typer.main.get_command(getattr(importlib.import_module(module), attribute or "app"))
    loaded.name = command.name
    return loaded


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"fairlead {version('fairlead')}")
        raise typer.Exit


def run_program(program: Any, name: str, argv: Sequence[str] | None) -> None:
    """Parse the command line, run its command and exit with its status. An error that the user can correct is one line on stderr."""
    words = sys.argv[1:] if argv is None else list(argv)
    command = name
    try:
        try:
            code = program.main(words, prog_name=name, standalone_mode=False)
            sys.stdout.flush()
        except UserError as error:
            command = " ".join([name, *_subcommands(program, words)])
            print(f"{command}: {error}", file=sys.stderr)
            code = 2
        except TyperException as error:
            code = _print_usage_error(name, error)
        except (KeyboardInterrupt, typer.Abort):
            code = 130
    except (BrokenPipeError, PipeClosed):
        if not _reader_left():
            raise
        code = 128 + signal.SIGPIPE
    sys.exit(code or 0)


def _subcommands(program: Any, words: Sequence[str]) -> list[str]:
    """Return the subcommand that the command line names, for messages."""
    return [words[0]] if words and words[0] in program.list_commands(None) else []


def _print_usage_error(name: str, error: TyperException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else name
    if type(error).__name__ != "NoArgsIsHelpError":  # that one has printed the help
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"{path}: {message}{'' if message.endswith('?') else '.'} `{path} --help` lists the options", file=sys.stderr)
    return 2


def _reader_left() -> bool:
    """Return whether the reader of standard output closed it, as `head` does. If so, later output goes to /dev/null."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # poll reports errors even without requested events
    left = bool(output.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left
