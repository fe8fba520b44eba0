"""The cluster's certificates: one authority, and one certificate for each identity. The run directory holds their keys."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

_DAYS = "30"
# File name → subject. Kubernetes reads the user from CN and the groups from O.
CLIENTS = {
    "admin": "/O=system:masters/CN=fairlead-e2e",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "kubelet": "/O=system:nodes/CN=system:node:node1",
    "kube-proxy": "/CN=system:kube-proxy",
    "coredns": "/CN=system:coredns",
}


def write_all(folder: Path, server_names: list[str], server: str) -> None:
    """Write ca, apiserver, service-accounts and a NAME.kubeconfig for each of CLIENTS into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(folder, "req", "-x509", *_key("ca"), "-subj", "/CN=fairlead-e2e-ca", "-days", _DAYS, "-out", "ca.crt")
    (folder / "apiserver.ext").write_text(f"subjectAltName={','.join(server_names)}\nextendedKeyUsage=serverAuth\n")
    _sign(folder, "apiserver", "/CN=kube-apiserver")
    _openssl(folder, "genrsa", "-out", "service-accounts.key", "2048")
    _openssl(folder, "rsa", "-in", "service-accounts.key", "-pubout", "-out", "service-accounts.pub")
    for name, subject in CLIENTS.items():
        _write_client(folder, name, subject, server)


def write_client(folder: Path, authority: Path, name: str, subject: str, server: str) -> None:
    """Write NAME.kubeconfig into `folder`, with a certificate that the authority in the folder `authority` signs."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("ca.crt", "ca.key"):
        (folder / file).write_bytes((authority / file).read_bytes())
    _write_client(folder, name, subject, server)


def _write_client(folder: Path, name: str, subject: str, server: str) -> None:
    (folder / f"{name}.ext").write_text("extendedKeyUsage=clientAuth\n")
    _sign(folder, name, subject)
    (folder / f"{name}.kubeconfig").write_text(_kubeconfig(folder, name, server))


def _sign(folder: Path, name: str, subject: str) -> None:
    _openssl(folder, "req", *_key(name), "-subj", subject, "-out", f"{name}.csr")
    signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", _DAYS, "-extfile", f"{name}.ext"]
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.crt")


def _key(name: str) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]


def _kubeconfig(folder: Path, name: str, server: str) -> str:
    """Return a kubeconfig without references to other files. It is JSON, which is valid YAML."""

    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    user = {"client-certificate-data": data(f"{name}.crt"), "client-key-data": data(f"{name}.key")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fairlead", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "fairlead", "context": {"cluster": "fairlead", "user": name}}],
        "current-context": "fairlead",
    }
    return json.dumps(config, indent=1)


def _openssl(folder: Path, *arguments: str) -> None:
    result = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"openssl {' '.join(arguments)} failed in {folder}:\n{result.stderr.strip()}")
