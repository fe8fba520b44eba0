"""A real Prometheus server for tests, built from its Go module by `make kubernetes`. It listens on loopback and stores in a folder."""

import json
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.operator.support import apiserver
from tests.servers.redis_server import free_port
from tests.system.processes import until


class PrometheusServer:
    """Queries of a running server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=30)

    def _ask(self, path: str, **parameters: Any) -> Any:
        answer = self._http.get(path, params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the instant vector; fails with the server's message for an invalid query."""
        return list(self._ask("/query", query=expression)["result"])

    def values(self, expression: str) -> list[float]:
        """Return the numbers of the instant vector, without NaN: the result of 0 / 0 is no data."""
        numbers = [float(sample["value"][1]) for sample in self.query(expression)]
        return [number for number in numbers if not math.isnan(number)]

    def series(self, selector: str) -> list[dict[str, str]]:
        """Return the labels of all stored series that a selector matches."""
        return list(self._ask("/series", **{"match[]": selector}))

    def label_values(self, label: str, selector: str) -> list[str]:
        return list(self._ask(f"/label/{label}/values", **{"match[]": selector}))

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules with their health, last error and, for alerts, state."""
        return [rule for group in self._ask("/rules")["groups"] for rule in group["rules"]]


@contextmanager
def prometheus(folder: Path, scrape_configs: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[PrometheusServer]:
    """Run a server that scrapes each two seconds. `groups`: of rules, as in a PrometheusRule; their own intervals are ignored."""
    program = apiserver.program("prometheus")
    if program is None:
        pytest.skip("prometheus not found: run `make kubernetes` once (root on Debian, Go 1.26; minutes)")
    (folder / "rules.yaml").write_text(json.dumps({"groups": [{**group, "interval": "2s"} for group in groups]}))
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": list(scrape_configs),
    }
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    command = [str(program), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log, cwd=folder)
    try:
        until(lambda: _is_ready(address), f"Prometheus is ready ({folder / 'prometheus.log'})", 60)
        yield PrometheusServer(f"http://{address}")
    finally:
        process.kill()
        process.wait()


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/-/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
