"""CRDs of other projects, from their own Go modules: fetched once by `go`."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster.binaries import go_program

GATEWAY_API = ("sigs.k8s.io/gateway-api@v1.6.2", "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml")
GATEWAYS, BACKEND_POLICIES = (
    (GATEWAY_API[0], f"config/crd/standard/gateway.networking.k8s.io_{name}.yaml") for name in ("gateways", "backendtlspolicies")
)
CERTIFICATES = ("github.com/cert-manager/cert-manager@v1.21.2", "deploy/crds/cert-manager.io_certificates.yaml")
LEADER_WORKER_SET = ("sigs.k8s.io/lws@v0.9.0", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml")
INFERENCE = ("sigs.k8s.io/gateway-api-inference-extension@v1.3.0", "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml")

PROMETHEUS = "github.com/prometheus-operator/prometheus-operator@v0.90.1"
POD_MONITORS, RULES = (
    (PROMETHEUS, f"example/prometheus-operator-crd/monitoring.coreos.com_{name}.yaml") for name in ("podmonitors", "prometheusrules")
)


@cache
def crd(module: str, path: str) -> dict[str, Any]:
    """Skips the test where there is no Go, or no way to its proxy."""
    go = go_program()
    if go is None:
        pytest.skip("no go on PATH: CRDs of other projects come from their Go modules")
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GOWORK": "off"}
    try:
        done = subprocess.run(
            [go, "mod", "download", "-json", module], cwd="/", env=environment, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{module}: the Go proxy does not answer")
    if done.returncode != 0:
        pytest.skip(f"{module} cannot be fetched: {done.stdout[-300:]}{done.stderr[-300:]}")
    made: dict[str, Any] = yaml.load(
        (Path(json.loads(done.stdout)["Dir"]) / path).read_text(), yaml.CSafeLoader
    )  # yaml.safe_load: ten seconds
    return made
