"""What a process prints about flags and variables that it cannot use."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError


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
