"""The reason of a process's failure, for the kubelet and for people."""

import logging
import sys
from pathlib import Path
from typing import Final

TERMINATION_BYTES: Final = 4096
"""Kubernetes truncates a termination message to this length."""

log = logging.getLogger(__name__)


def report_failure(program: str, reason: str, termination_log: str, log_format: str) -> int:
    """Write the reason to the termination log and as the last line of stderr. Return the exit status."""
    path = Path(termination_log) if termination_log else None
    # Below /dev the file exists if a kubelet mounted it, and must not be created otherwise.
    if path is not None and (path.exists() or not path.is_relative_to("/dev")):
        try:
            path.write_bytes(reason.encode()[:TERMINATION_BYTES])
        except OSError as error:
            log.warning("FAIRLEAD_TERMINATION_LOG %s cannot be written: %s", path, error)
    if log_format == "json":
        log.error("%s", reason)
    else:
        print(f"{program}: {reason}", file=sys.stderr, flush=True)
    return 1
