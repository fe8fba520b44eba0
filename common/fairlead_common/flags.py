"""Flags and variables of a process: how they are read, and what is printed about those that it cannot use."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

OptionalPort = Annotated[Annotated[int, Field(ge=0, le=65535)] | None, BeforeValidator(lambda value: None if value == "" else value)]


class FlagSettings(BaseSettings):
    """Base of a configuration. Each flag is also `FAIRLEAD_<FLAG>` in the environment; flags win, the last one given wins."""

    model_config = SettingsConfigDict(
        env_prefix="FAIRLEAD_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )


@contextmanager
def exit_on_bad_flags(program: str) -> Iterator[None]:
    """End the process with status 2, and a line on stderr for each bad flag, if the configuration that is read inside is invalid."""
    try:
        yield
        return
    except ValidationError as error:
        lines = [_describe(problem) for problem in error.errors(include_url=False)]
    except SettingsError as error:
        lines = [f"{str(error).removeprefix('error parsing CLI: ')}; {program} --help lists the flags"]
    except ValueError as error:
        lines = [str(error)]
    for line in lines:
        print(f"{program}: {line}", file=sys.stderr)
    sys.exit(2)


def _describe(problem: Any) -> str:
    flag, message = "-".join(map(str, problem["loc"])).replace("_", "-"), problem["msg"].removeprefix("Value error, ")
    if not flag:  # a rule for several flags; its input is the whole configuration, with passwords
        return str(message)
    if problem["type"] == "missing":  # here too
        return f"--{flag} is missing; give it, or set FAIRLEAD_{flag.replace('-', '_').upper()}"
    value = re.sub(r"//.*@", "//***@", repr(problem["input"]))
    return f"--{flag} {value}: {message}"
