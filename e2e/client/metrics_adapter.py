"""Runs in a pod: serves one metric of pods at `custom.metrics.k8s.io`, as prometheus-adapter does, but read from the pods themselves.

The HorizontalPodAutoscaler's controller asks the API server, which forwards the request here over TLS.
"""

import json
import ssl
import sys
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

GROUP = "custom.metrics.k8s.io/v1beta2"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
METRIC, METRICS_PORT, CERTIFICATES, PORT = sys.argv[1], int(sys.argv[2]), sys.argv[3], 6443


def list_pods(namespace: str, selector: str) -> list[dict]:
    query = urllib.parse.urlencode({"labelSelector": selector})
    request = urllib.request.Request(f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/pods?{query}")
    request.add_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text()}")
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=5, context=trusted) as answer:
        return json.load(answer)["items"]


def read_metric(pod: dict) -> float | None:
    """Return the sum over the metric's labels; None: the pod shows none."""
    try:
        with urllib.request.urlopen(f"http://{pod['status']['podIP']}:{METRICS_PORT}/metrics", timeout=3) as page:
            lines = page.read().decode().splitlines()
    except (KeyError, OSError):  # the pod starts or ends
        return None
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{METRIC}{{", f"{METRIC} "))]
    return sum(values) if values else None


def measure(namespace: str, selector: str) -> dict:
    items = []
    for pod in list_pods(namespace, selector):
        value = read_metric(pod)
        if value is not None:
            items.append(
                {
                    "describedObject": {"kind": "Pod", "namespace": namespace, "name": pod["metadata"]["name"], "apiVersion": "v1"},
                    "metric": {"name": METRIC},
                    "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "value": f"{round(1000 * value)}m",
                }
            )
    return {"kind": "MetricValueList", "apiVersion": GROUP, "metadata": {}, "items": items}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        parts = urllib.parse.unquote(url.path).strip("/").split("/")
        if url.path == f"/apis/{GROUP}":
            resource = {"name": f"pods/{METRIC}", "singularName": "", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
            self.answer(200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [resource]})
        elif parts[:4] == ["apis", *GROUP.split("/"), "namespaces"] and parts[5:] == ["pods", "*", METRIC]:
            self.answer(200, measure(parts[4], urllib.parse.parse_qs(url.query).get("labelSelector", [""])[0]))
        else:
            self.answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "message": f"no {self.path}"})

    def answer(self, code: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


server = ThreadingHTTPServer(("0.0.0.0", PORT), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(f"{CERTIFICATES}/tls.crt", f"{CERTIFICATES}/tls.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
