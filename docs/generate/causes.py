"""Write the page of all causes of failure from the table of the tests that produce them.

mkdocs calls `on_files` at each build, so that the page cannot differ from what the tests check.
"""

import re
from collections.abc import Iterable

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from tests.operator.on_apiserver.causes.refused import REFUSED
from tests.operator.on_apiserver.causes.row import Row
from tests.operator.on_apiserver.causes.table import TABLE

PAGE = "operate/causes.md"
INTRODUCTION = """<!-- Generated from tests/operator/on_apiserver/causes by docs/generate/causes.py. -->

# Causes of failure

What you see for each cause: the condition and its reason, the type of the Event, which has the same reason, the alerts that fire if the
cause lasts, and the next step in the words of `kubectl fairlead explain`. [Conditions and reasons](conditions.md) explains the conditions,
[Alerts](alerts.md) has a runbook for each alert.

`tests/operator/on_apiserver/causes/test_causes_of_failure.py` produces every one on a real API server, with Kubernetes' own scheduler and
controllers, and the errors of real workers and routers. What a kubelet reports is written there in a kubelet's words.

"""


REFUSALS = """## The API server refuses the manifest

There is no service, and `kubectl apply` shows the answer. Examples of the rules:

| Cause | Answer |
| --- | --- |
"""


def page() -> str:
    """Return the page, with a table for each heading."""
    refused = "".join(f"| {row.cause} | {_words(row.answer)} |\n" for row in REFUSED)
    return INTRODUCTION + "".join(f"## {heading}\n\n{_table(rows)}" for heading, rows in TABLE.items()) + REFUSALS + refused


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the placeholder in the repository by the page."""
    if placeholder := files.get_file_from_path(PAGE):
        files.remove(placeholder)
    files.append(File.generated(config, PAGE, content=page()))
    return files


def _table(rows: Iterable[Row]) -> str:
    lines = ["| Cause | Condition | Reason | Event | Alerts | Next step |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*lines, *map(_line, rows)]) + "\n\n"


def _line(row: Row) -> str:
    alerts = ", ".join(f"[{alert.removeprefix('Fairlead')}](alerts.md#{alert.lower()})" for alert in row.alerts)
    return f"| {row.cause} | `{row.condition}` {row.status} | `{row.reason}` | {row.event} | {alerts} | {_words(row.next_step)} |"


def _words(text: str) -> str:
    """Return a next step as a sentence, with its fields and URLs as code."""
    text = text if text.startswith("spec.") else text[0].upper() + text[1:]
    return re.sub(r"(spec(?:\.\w+)+|\w+://\S*)", r"`\1`", text)
