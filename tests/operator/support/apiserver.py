"""A real kube-apiserver on a real etcd, without nodes: schema, CEL, server-side apply, `/scale` and watches as in production."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3

TOKEN = "for-tests-on-loopback-only"
USERS = ("operator-a", "operator-b")
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "Metadata", "users": list(USERS)},
        {"level": "None"},
    ],
}
DEADLINE = 60.0  # seconds for etcd and the apiserver to come up; five are usual
KEPT = 8  # connections

urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # the certificate is made anew each time


def program(name: str) -> Path | None:
    """A binary from PATH or from the cache that `make e2e` fills (the newest build)."""
    found = shutil.which(name)
    if found:
        return Path(found)
    cache = Path(os.environ.get("FAIRLEAD_CACHE") or Path.home() / ".cache" / "fairlead")
    built = sorted((cache / "bin").glob(f"*/{name}"), key=lambda path: path.stat().st_mtime)
    return built[-1] if built else None


def missing() -> str:
    """Return what is missing; empty: the server can be started."""
    names = [name for name in ("etcd", "kube-apiserver") if program(name) is None]
    return "" if not names else (f"{' and '.join(names)} not found: run `make kubernetes` once (root on Debian, Go 1.26; minutes)")


@dataclass(frozen=True)
class ApiServer:
    """A running server, with cluster-admin's credentials."""

    url: str
    kubeconfig: Path
    audit: Path
    _http: urllib3.PoolManager = field(default_factory=lambda: urllib3.PoolManager(maxsize=KEPT, cert_reqs="CERT_NONE"), compare=False)

    def kubeconfig_of(self, user: str, folder: Path) -> Path:
        """Credentials of one of USERS, all of them administrators: whose name then stands in the audit log."""
        config = json.loads(self.kubeconfig.read_text())
        config["users"][0]["user"]["token"] = f"{TOKEN}-{user}"
        path = folder / f"{user}.kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def writes(self, user: str) -> list[dict[str, Any]]:
        """Every write that `user` has asked for, refused ones too, oldest first (from the audit log)."""
        text = self.audit.read_text() if self.audit.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()  # the last line may be half written
        return [event for event in map(json.loads, lines) if event["user"]["username"] == user]

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> tuple[int, Any]:
        """(status, JSON answer)."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": content_type, "Accept": "application/json"}
        text = None if body is None else json.dumps(body).encode()
        answer = self._http.request(method, self.url + path, body=text, headers=headers, timeout=30)
        return answer.status, _json(answer.data)

    def create(self, path: str, body: Any, *, strict: bool = True, dry_run: bool = False) -> Any:
        """Create an object, or with `dry_run` only check it and fill in its defaults; raises Refused with the server's message."""
        query = "&".join(["fieldValidation=Strict"] * strict + ["dryRun=All"] * dry_run)
        code, answer = self.request("POST", f"{path}?{query}", body)
        if code >= 300:
            raise Refused(answer["message"])
        return answer

    def get(self, path: str) -> Any:
        """The object, or None."""
        code, answer = self.request("GET", path)
        return None if code == 404 else answer

    def kubectl(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        kubectl = program("kubectl")
        assert kubectl is not None
        command = [str(kubectl), f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.kubeconfig.parent / 'cache'}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)


class Refused(Exception):
    pass


@contextmanager
def start() -> Iterator[ApiServer]:
    """Start both on free loopback ports; ends both and removes their files."""
    problem = missing()
    if problem:
        raise RuntimeError(problem)
    folder = Path(tempfile.mkdtemp(prefix="fairlead-apiserver-"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "log").open("wb") as log:
            etcd, peer, port = _free_ports(3)
            processes.append(subprocess.Popen(_etcd(folder, etcd, peer), stdout=log, stderr=log))
            processes.append(subprocess.Popen(_apiserver(folder, etcd, port), stdout=log, stderr=log))
        server = ApiServer(f"https://127.0.0.1:{port}", _kubeconfig(folder, port), folder / "audit")
        _await_ready(server, processes, folder / "log")
        yield server
    finally:
        for process in processes:
            process.kill()  # a graceful end takes ten seconds, and what they hold is thrown away
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _etcd(folder: Path, port: int, peer: int) -> list[str]:
    return [
        str(program("etcd")),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{port}",
        f"--advertise-client-urls=http://127.0.0.1:{port}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-cluster=default=http://127.0.0.1:{peer}",
        "--unsafe-no-fsync",
    ]


def _apiserver(folder: Path, etcd: int, port: int) -> list[str]:
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    users = {TOKEN: "admin"} | {f"{TOKEN}-{user}": user for user in USERS}
    (folder / "tokens.csv").write_text("".join(f"{token},{user},{user},system:masters\n" for token, user in users.items()))
    (folder / "policy").write_text(json.dumps(AUDIT_POLICY))
    return [
        str(program("kube-apiserver")),
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={folder / 'certificates'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        f"--audit-policy-file={folder / 'policy'}",
        f"--audit-log-path={folder / 'audit'}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--disable-admission-plugins=ServiceAccount",  # its controller makes the accounts, and is not running
        "--endpoint-reconciler-type=none",
    ]


def _kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
    }
    path.write_text(json.dumps(config))
    return path


def _await_ready(server: ApiServer, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            break
        try:
            if server.request("GET", "/readyz")[0] == 200 and server.get("/api/v1/namespaces/default") is not None:
                return
        except urllib3.exceptions.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the API server did not come up:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:]))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"message": text.decode(errors="replace")}
