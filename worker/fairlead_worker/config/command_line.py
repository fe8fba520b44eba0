"""The command line of `fairlead-worker`: an argparse parser made from the configuration's fields, and errors that name flags."""

import argparse
import difflib
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fairlead_index.redis.access import redact_url
from fairlead_worker.config.options import TOPICS, flag_name, setting_name, topic_of, variable_name

PROGRAM: Final = "fairlead-worker"
_METAVARS: Final[Mapping[type, str]] = {int: "N", float: "NUMBER", str: "TEXT"}
_EPILOG: Final = (
    "Each flag is also an environment variable: --max-num-seqs is FAIRLEAD_MAX_NUM_SEQS. A flag wins over its variable. "
    "Settings of the operator have only variables; the reference page of the worker's flags lists them."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End the process with one line, without the usage."""
        raise SystemExit(_fail([message]))


def parse_flags(fields: Mapping[str, FieldInfo], arguments: list[str]) -> dict[str, Any]:
    """Return the value of each given flag by field name. End the process with status 2 for an unknown one, with 0 after `--help`."""
    values, unknown = build_parser(fields).parse_known_args(arguments)
    if unknown:
        # A word after an unknown flag is most likely its value.
        named = [argument for number, argument in enumerate(unknown) if argument.startswith("-") or number == 0]
        raise SystemExit(_fail(_describe_unknown(argument, fields) for argument in named))
    return vars(values)


def build_parser(fields: Mapping[str, FieldInfo]) -> argparse.ArgumentParser:
    """Return the parser. Its groups are the topics; flags that are not given are absent from the result."""
    parser = _Parser(
        prog=PROGRAM,
        description="Serve one model, or one node's part of it.",
        usage=f"{PROGRAM} --model URI [FLAG ...]",
        epilog=_EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=min(140, shutil.get_terminal_size().columns)),
    )
    for topic in TOPICS:
        group = parser.add_argument_group(topic)
        for name, field in fields.items():
            if topic_of(field) == topic:
                _add(group, name, field)
    return parser


def _add(group: Any, name: str, field: FieldInfo) -> None:
    text = (field.description or "").replace("%", "%%")
    if isinstance(field.default, str | int | float) and field.default != "":
        text += f" (default: {describe_value(field.default)})"
    if field.annotation is bool:
        group.add_argument(flag_name(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(field.annotation) is list:
        group.add_argument(flag_name(name), dest=name, nargs="+", action="extend", metavar="NAME=URI", help=text)
    else:
        group.add_argument(flag_name(name), dest=name, metavar=_metavar(field.annotation), help=text)


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    return _METAVARS.get(kind, "KEYS")


def describe_value(value: Any) -> str:
    """Return a setting's value for a log line or a page: booleans as JSON, objects by their keys that differ from the defaults."""
    if isinstance(value, bool):
        return str(value).lower()
    if hasattr(value, "model_dump"):
        changed = value.model_dump(exclude_defaults=True)
        return ",".join(f"{key}={each}" for key, each in changed.items()) or "defaults"
    return str(value)


def exit_with_errors(error: ValidationError, fields: Mapping[str, FieldInfo]) -> NoReturn:
    """Print one line for each problem, with the flag or the variable that sets the value, and end the process with status 2."""
    raise SystemExit(_fail(_describe_problem(problem, fields) for problem in error.errors(include_url=False)))


def _fail(lines: Iterable[str]) -> int:
    for line in lines:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    return 2


def _describe_unknown(argument: str, fields: Mapping[str, FieldInfo]) -> str:
    given = argument.partition("=")[0]
    if not given.startswith("--"):
        return f"{argument!r} is not a flag; give the model as --model {argument}"
    for name, field in fields.items():
        if flag_name(name) == given and not topic_of(field):
            return f"{given} is not a flag; set the environment variable {variable_name(name)}"
    limits = _keys_of(fields["limits"])
    if (key := given[2:].replace("-", "_")) in limits:
        return f"{given} is not a flag; give --limits {key}=VALUE"
    flags = [flag_name(name) for name, field in fields.items() if topic_of(field)]
    words = set(given[2:].split("-"))
    similar = [flag for flag in flags if words <= set(flag[2:].split("-"))] or difflib.get_close_matches(given, flags, 1, cutoff=0.7)
    return f"{given} is not a flag; " + (f"did you mean {similar[0]}?" if similar else f"{PROGRAM} --help lists the flags")


def _keys_of(field: FieldInfo) -> tuple[str, ...]:
    return tuple(getattr(field.annotation, "model_fields", ()))


def _describe_problem(problem: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name, *keys = (str(part) for part in problem["loc"])
    source = setting_name(name, fields[name])
    if problem["type"] == "missing":
        if keys:
            return f"{source} lacks the key {keys[-1]!r}"
        return f"{source} is missing; give it, or set {variable_name(name)}"
    if keys:
        return f"{source} {keys[-1]}={problem['input']!r}: {message}"
    given = problem["input"]
    if not isinstance(given, str | int | float):
        return f"{source}: {message}"
    return f"{source} {hide_password(name, given)!r}: {message}"


def hide_password(name: str, value: object) -> object:
    """Return a setting's value for a log line, without a password."""
    if name == "nodes_secret":
        return "***" if value else ""
    return redact_url(str(value)) if name == "redis_url" else value
