"""Scrape configurations of Prometheus made of the chart's PodMonitors, as prometheus-operator makes them."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_POD = "__meta_kubernetes_pod"


def scrape_config(monitor: Mapping[str, Any], kubeconfig: Path, *, proxied: bool = False) -> dict[str, Any]:
    """Return the scrape configuration of a PodMonitor.

    `kubeconfig`: JSON of `kubectl config view --raw --minify -o json`. `proxied`: scrape through the API server, for a Prometheus that does
    not reach pods.
    """
    metadata, spec = monitor["metadata"], monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    chosen = spec.get("namespaceSelector") or {"matchNames": [metadata["namespace"]]}
    labels = ",".join(f"{key}={value}" for key, value in spec["selector"]["matchLabels"].items())
    discovery: dict[str, Any] = {"role": "pod", "kubeconfig_file": str(kubeconfig), "selectors": [{"role": "pod", "label": labels}]}
    if not chosen.get("any"):
        discovery["namespaces"] = {"names": chosen["matchNames"]}
    relabelings = [
        {"source_labels": [f"{_POD}_phase"], "regex": "(Failed|Succeeded)", "action": "drop"},
        {"source_labels": [f"{_POD}_container_port_name"], "regex": endpoint["port"], "action": "keep"},
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [f"{_POD}_name"], "target_label": "pod"},
        {"source_labels": [f"{_POD}_name", f"{_POD}_container_port_number"], "separator": ":", "target_label": "instance"},
    ]
    relabelings += [
        {"source_labels": each["sourceLabels"], "target_label": each["targetLabel"]} for each in endpoint.get("relabelings") or []
    ]
    config = {
        "job_name": f"{metadata['namespace']}/{metadata['name']}",
        "honor_labels": endpoint.get("honorLabels", False),
        "metrics_path": endpoint["path"],
        "kubernetes_sd_configs": [discovery],
        "relabel_configs": relabelings,
    }
    return config | _through_api_server(endpoint["path"], kubeconfig, relabelings) if proxied else config


def _through_api_server(path: str, kubeconfig: Path, relabelings: list[dict[str, Any]]) -> dict[str, Any]:
    """Let the targets be paths of the API server, with the credentials of the kubeconfig."""
    view = json.loads(kubeconfig.read_text())
    cluster, user = view["clusters"][0]["cluster"], view["users"][0]["user"]
    tls: dict[str, Any] = {}
    for option, source, name in (
        ("ca_file", cluster, "certificate-authority-data"),
        ("cert_file", user, "client-certificate-data"),
        ("key_file", user, "client-key-data"),
    ):
        if name in source:
            tls[option] = str(kubeconfig.with_name(name))
            Path(tls[option]).write_bytes(base64.b64decode(source[name]))
    proxy = [
        {
            "source_labels": ["__meta_kubernetes_namespace", f"{_POD}_name", f"{_POD}_container_port_number"],
            "separator": ";",
            "regex": "(.+);(.+);(.+)",
            "replacement": f"/api/v1/namespaces/$1/pods/$2:$3/proxy{path}",
            "target_label": "__metrics_path__",
        },
        {"replacement": urlsplit(cluster["server"]).netloc, "target_label": "__address__"},
    ]
    access: dict[str, Any] = {"authorization": {"credentials": user["token"]}} if "token" in user else {}
    return {"scheme": "https", "tls_config": tls, "relabel_configs": [*relabelings, *proxy], **access}
