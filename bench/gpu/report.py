"""One JSON of everything that was found, written again after each finding: a run that is cut short still tells."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.common.report import machine_facts


def beside(row: Mapping[str, Any], name: str, *, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    """`row` with the bar that its figure `name` has to meet: at least `least`, or at most `most`."""
    value = row[name]
    if least is not None:
        return {**row, "bar": f"{name} at least {least:g}", "met": value >= least}
    return {**row, "bar": f"{name} at most {most:g}", "met": most is not None and value <= most}


class Report:
    """The findings of one run. A finding is a row with `ok` where it checks something, without where it measures."""

    def __init__(self, folder: Path | None, facts: Mapping[str, Any], only: Sequence[str] = (), file: Path | None = None) -> None:
        """Write to `file`, or to a file in `folder` whose name has the date, the commit and the stages of `only`. Neither: only print."""
        self.began = time.monotonic()
        machine = {**machine_facts(), **facts}
        self.results: dict[str, Any] = {"stages": {}}
        self.document = {"benchmark": "gpu/check", "machine": machine, "options": {"only": list(only)}, "results": self.results}
        name = "-".join((f"{datetime.now(UTC):%Y-%m-%d}", machine["commit"], *only))
        self.path = file or (None if folder is None else folder / f"{name}.json")
        self.failed: list[str] = []
        self.bars: list[Mapping[str, Any]] = []
        """Rows with a bar, which a run may miss without being wrong."""

    def begin(self, stage: str) -> None:
        self.results["stages"][stage] = {"state": "running", "at_seconds": round(time.monotonic() - self.began, 1), "rows": []}
        self._write()

    def add(self, stage: str, row: Mapping[str, Any]) -> None:
        """One finding of a running stage."""
        self.results["stages"][stage]["rows"].append(dict(row))
        if "bar" in row:
            self.bars.append(row)
            self.results["bars"] = [self._line(row) for row in self.bars]
        if row.get("ok") is False:
            self.failed.append(f"{stage}: {row.get('what', row)}")
        shown = "  ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items())
        print(f"{time.monotonic() - self.began:6.1f} s  {stage:21} {shown}", flush=True)
        self._write()

    def summary(self) -> str:
        """For the end of a run: each figure beside its bar, and what failed."""
        lines = [f"gpu_check {'failed' if self.failed else 'ok'}", *(f"  {line}" for line in self.failed)]
        if self.bars:
            lines.append(f"bars: {sum(bool(row['met']) for row in self.bars)} of {len(self.bars)} are met")
        return "\n".join([*lines, *(f"  {self._line(row)}" for row in self.bars)])

    @staticmethod
    def _line(row: Mapping[str, Any]) -> str:
        return f"{'met ' if row['met'] else 'MISSED'} {row['what']}: {row[str(row['bar']).partition(' ')[0]]:.4g} ({row['bar']})"

    def end(self, stage: str, state: str) -> None:
        """`state`: done, out of time, skipped with its reason, or failed with its reason."""
        entry = self.results["stages"].setdefault(stage, {"rows": []})
        entry["state"] = state
        if "at_seconds" in entry:
            entry["seconds"] = round(time.monotonic() - self.began - entry["at_seconds"], 1)
        if state.startswith("failed"):
            self.failed.append(f"{stage}: {state}")
        print(f"{time.monotonic() - self.began:6.1f} s  {stage:21} {state}", flush=True)
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.document, indent=1) + "\n")
        fresh.replace(self.path)
