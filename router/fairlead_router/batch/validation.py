"""Validation of input files, before any line runs. Pure, and fed with chunks: a file never has to fit into memory."""

import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator

import msgspec

from fairlead_common.truncate import quote
from fairlead_router.batch.records import Problem

MAX_PROBLEMS = 100
"""Problems that a failed batch reports."""
MAX_CUSTOM_ID = 512
MAX_MODEL = 256
"""Characters of a model's name, which is part of the batch's record."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class Line(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None


_TEXT = re.compile(rb"\S[^\n]*")
"""A line from its first character that is no white space."""
_lines, _bodies = msgspec.json.Decoder(Line), msgspec.json.Decoder(_Body)


def decode_line(text: bytes) -> Line:
    """Return a line that was validated."""
    return _lines.decode(text)


class LineIndex:
    """Where the lines of a file start. Line `number` counts from 1 and includes empty lines, as editors count."""

    def __init__(self) -> None:
        self.numbers, self.starts, self.lengths = array("L"), array("Q"), array("L")

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, number: int, start: int, length: int) -> None:
        self.numbers.append(number)
        self.starts.append(start)
        self.lengths.append(length)


class LineSplitter:
    """Finds the lines of a file that arrives in chunks. Empty lines, and a byte order mark at the start, are skipped."""

    def __init__(self, max_line_bytes: int) -> None:
        self.index = LineIndex()
        self._max = max_line_bytes
        self._rest = b""
        self._at = 0
        """Offset of `_rest` in the file."""
        self._number = 0
        """Line breaks before `_rest`."""
        self.too_long: int | None = None
        """First line that exceeds the limit. Nothing after it is read."""

    def feed(self, chunk: bytes, is_last: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield the complete lines, with their numbers. At the end of the file, the last line needs no line break.

        Empty lines cost what a search for the next character costs, 3 ms for a million. Call it again only once all lines were taken.
        """
        data = self._rest + chunk
        end = len(data) if is_last else data.rfind(b"\n") + 1
        counted = 0
        for match in _TEXT.finditer(data, 0, end):
            start, text = match.start(), match[0]
            self._number += data.count(b"\n", counted, start)
            number, counted, line_start = self._number + 1, start, data.rfind(b"\n", 0, start) + 1
            if match.end() - line_start > self._max:
                self.too_long = number
                return
            if number == 1 and start == 0 and text.startswith(BOM_UTF8):
                start, text = len(BOM_UTF8), text[len(BOM_UTF8) :]
                if not text.strip():
                    continue
            self.index.add(number, self._at + start, len(text))
            yield number, text
        self._number += data.count(b"\n", counted, end)
        self._at += end
        self._rest = data[end:]
        if len(self._rest) > self._max:
            self.too_long = self._number + 1


class Validator:
    """Validates the lines of one batch."""

    def __init__(self, endpoint: str, max_lines: int) -> None:
        self._endpoint, self._max_lines = endpoint, max_lines
        self._lines_of: dict[str, int] = {}
        self.model: str | None = None
        self.problems: list[Problem] = []

    @property
    def is_done(self) -> bool:
        """Whether further lines change nothing: enough problems were found, or too many lines."""
        return len(self.problems) >= MAX_PROBLEMS or len(self._lines_of) > self._max_lines

    def check_all(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Validate lines, given with their numbers, until `is_done`."""
        for number, text in lines:
            self._check(number, text)
            if self.is_done:
                return

    def _check(self, number: int, text: bytes) -> None:
        try:
            line = _lines.decode(text)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            code = "invalid_request" if isinstance(error, msgspec.ValidationError) else "invalid_json_line"
            self._report(number, code, f"This line is not a JSON object with custom_id, method, url and body: {error}.")
            return
        if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
            self._report(number, "invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
            return  # it is not kept either
        if line.custom_id in self._lines_of:
            message = f"custom_id {quote(line.custom_id)} is that of line {self._lines_of[line.custom_id]} too; each must be unique."
            self._report(number, "duplicate_custom_id", message, "custom_id")
        self._lines_of.setdefault(line.custom_id, number)
        if len(self._lines_of) == self._max_lines + 1:
            self._report(number, "too_many_lines", f"The file has more than {self._max_lines} lines: split it.")
        if line.method != "POST":
            self._report(number, "invalid_method", f"method is {quote(line.method)}; only POST is supported.", "method")
        if line.url != self._endpoint:
            self._report(number, "invalid_url", f"url is {quote(line.url)}, but the batch's endpoint is {self._endpoint}.", "url")
        self._check_body(number, line.body)

    def _check_body(self, number: int, raw: msgspec.Raw) -> None:
        try:
            body = _bodies.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._report(number, "invalid_body", f"body is not a JSON object with a model: {error}.", "body")
            return
        if body.stream:
            self._report(number, "invalid_stream", "body.stream is true; a batch cannot stream: remove it.", "body.stream")
        if len(body.model) > MAX_MODEL:
            self._report(number, "invalid_model", f"body.model must have at most {MAX_MODEL} characters.", "body.model")
        elif self.model is None:
            self.model = body.model
        elif body.model != self.model:
            message = f"body.model is {quote(body.model)}, but an earlier line has {quote(self.model)}; a batch uses one model."
            self._report(number, "mismatched_model", message, "body.model")

    def finish(self, splitter: LineSplitter, max_line_bytes: int) -> None:
        """Report what concerns the whole file."""
        if splitter.too_long is not None:
            self._report(splitter.too_long, "line_too_long", f"This line exceeds {max_line_bytes} bytes (--max-line-bytes).")
        elif not len(splitter.index):
            self.problems.append(Problem("empty_file", "The input file contains no lines."))

    def _report(self, number: int, code: str, message: str, param: str | None = None) -> None:
        self.problems.append(Problem(code, message, param, number))
