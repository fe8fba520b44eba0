"""Options of commands as frozen dataclasses, and those that many commands share.

A field is `name: Annotated[TYPE, typer.Option(help=…)] = DEFAULT`; its flag is `--name`. `@takes(Options)` makes a Typer command of a
function that receives one `Options`.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from fairlead.errors import PipeClosed, UserError

T = TypeVar("T")
Format = Literal["table", "json", "yaml"]
KeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="File with the API key, for servers that require one.")]
Url = Annotated[str, typer.Option(metavar="U", help="A router's admin port, http://HOST:PORT (default: your runs on this machine).")]
Output = Annotated[Format, typer.Option("--output", "-o", help="json and yaml are for scripts.")]

_cluster_option = partial(typer.Option, rich_help_panel="Cluster")
Namespace = Annotated[str, _cluster_option("--namespace", "-n", metavar="NS", help="Namespace (default: that of the context).")]
AllNamespaces = Annotated[bool, _cluster_option("--all-namespaces", "-A", help="All namespaces.")]
Context = Annotated[str, _cluster_option(metavar="C", help="Context of the kubeconfig (default: the current one).")]
Kubeconfig = Annotated[str, _cluster_option(metavar="FILE", help="Kubeconfig file (default: $KUBECONFIG, then ~/.kube/config).")]


def takes(options: type[T]) -> Callable[[Callable[[T], int]], Callable[..., int]]:
    """Return a decorator that turns a function of one options dataclass into a function with one parameter for each field."""

    def wrap(run: Callable[[T], int]) -> Callable[..., int]:
        hints = get_type_hints(options, include_extras=True)

        def command(**given: Any) -> int:
            try:
                return run(options(**given))
            except BrokenPipeError as error:
                raise PipeClosed from error

        parameters = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=_default(each), annotation=hints[each.name])
            for each in dataclasses.fields(options)  # type: ignore[arg-type]  # the callers give dataclasses
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        return command

    return wrap


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def print_data(value: Any, output: Format) -> None:
    """Print JSON-like data as JSON or YAML."""
    if output == "yaml":
        import yaml

        print(yaml.safe_dump(json.loads(json.dumps(value)), sort_keys=False, allow_unicode=True), end="")
    else:
        print(json.dumps(value, indent=2, ensure_ascii=False))


def key_headers(file: Path | None) -> dict[str, str]:
    """Return the Authorization header of the key in `file`; nothing without a file. Raises UserError."""
    if file is None:
        return {}
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api-key-file {file}: {getattr(error, 'strerror', None) or error}") from None
    if not key or len(key.split()) > 1:
        raise UserError(f"--api-key-file {file}: must contain one key; `fairlead keys new TENANT` creates one")
    return {"Authorization": f"Bearer {key}"}
