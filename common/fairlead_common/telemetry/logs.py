"""Log lines of a process: text for people, or one JSON object a line (`--log-format json`) with the ids of the request and its trace."""

import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, TextIO

import msgspec

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LogFormat = Literal["text", "json"]
_PACKAGES = ("fairlead", "fairlead_agent", "fairlead_common", "fairlead_index", "fairlead_operator", "fairlead_router", "fairlead_worker")
_request: ContextVar[tuple[str, str]] = ContextVar("request of the log lines", default=("", ""))


def bind_request(request_id: str, trace_id: str) -> None:
    """Set the ids that JSON lines of the current task, and of tasks that it starts, carry."""
    _request.set((request_id, trace_id))


def json_line(at: float, level: str, logger: str, message: str, request_id: str = "", trace_id: str = "", **more: Any) -> str:
    """Return one line. `at`: Unix time in seconds. Ids are empty outside of a request or without a trace."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    fields = {"time": f"{stamp}.{int(at * 1000) % 1000:03d}Z", "level": level, "logger": logger, "message": message}
    return msgspec.json.encode({**fields, "request_id": request_id, "trace_id": trace_id, **more}).decode()


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object. An exception's traceback is the field `exception`, so that it stays on the line."""

    def __init__(self, process: str = "") -> None:
        """`process`: name of a child process, a field of each line; empty: no field."""
        super().__init__()
        self._more = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        more = dict(self._more)
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        # Surrogates, as of file names with other encodings, cannot be encoded.
        message = record.getMessage().encode("utf-8", "replace").decode()
        return json_line(record.created, record.levelname, record.name, message, *_request.get(), **more)


def configure_logging(level: LogLevel, format: LogFormat, stream: TextIO, text_format: str, process: str = "") -> None:
    """Send the records of this process to `stream`.

    `level` is that of Fairlead's loggers. Those of libraries log INFO at most, because DEBUG lines of an HTTP client hide everything else.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process) if format == "json" else logging.Formatter(text_format))
    logging.basicConfig(level=max(logging.INFO, logging.getLevelNamesMapping()[level]), handlers=[handler])
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(level)
    if format == "json":  # what else Python itself prints
        logging.captureWarnings(True)
        sys.excepthook = _make_excepthook(logging.getLogger("fairlead"))


def _make_excepthook(logger: logging.Logger) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        logger.critical("uncaught exception: the process ends", exc_info=(kind, error, traceback))

    return log_uncaught
