"""A schedule trace, read from a file."""

from pathlib import Path

from fairlead.errors import UserError
from fairlead_common.schedule.trace import NotATrace, Trace, parse


def read(path: Path) -> Trace:
    """Read the trace in `path`. An incomplete last line, left by a killed worker, is ignored. Raises UserError for any other error."""
    try:
        return parse(path.read_bytes().splitlines())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except NotATrace as error:
        raise UserError(f"{path}: {error}") from None
