"""The chart in tests: the project's own `helm`, and what it renders."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.support import apiserver

CHART = Path(__file__).parents[3] / "charts" / "fairlead"
PROMETHEUS = ("--api-versions=monitoring.coreos.com/v1/PodMonitor", "--api-versions=monitoring.coreos.com/v1/PrometheusRule")
EVERYTHING = ("podMonitors", "rules", "dashboards")


def helm(*arguments: str, kubeconfig: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    program = apiserver.program("helm")
    if program is None:
        pytest.skip("helm not found: run `make kubernetes` once (root on Debian, Go 1.26; minutes)")
    environment = {**os.environ, **({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})}
    return subprocess.run([str(program), *arguments], input=stdin, env=environment, capture_output=True, text=True, timeout=120)


def rendered(*arguments: str) -> str:
    done = helm("template", "fl", str(CHART), "--namespace", "fairlead-system", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(text: str) -> list[Any]:
    """Return the documents of a text, by libyaml: yaml.safe_load takes ten times as long for the chart's 200 KB."""
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def template(*arguments: str) -> list[dict[str, Any]]:
    return load(rendered(*arguments))


def everything() -> tuple[str, ...]:
    """Arguments that turn on whatever the chart can make."""
    on = [f"--set=monitoring.{name}=true" for name in EVERYTHING]
    return (*PROMETHEUS, *on, "--set=admissionPolicy.enabled=true", "--set=operator.replicas=2")
