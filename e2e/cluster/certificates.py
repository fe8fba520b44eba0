"""The cluster's certificates: one authority, and one certificate for each identity. The run directory holds their keys."""

from __future__ import annotations

import base64
import ipaddress
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = timedelta(days=30)
BACKDATED = timedelta(hours=1)
"""Valid already for clocks that are behind, as other authorities make them."""
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
    authority = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fairlead-e2e-ca")])
    made = _builder(name, name, authority, authority).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    _write_pair(folder, "ca", authority, made.sign(authority, hashes.SHA256()))
    _sign(folder, "apiserver", "/CN=kube-apiserver", ExtendedKeyUsageOID.SERVER_AUTH, server_names)
    accounts = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write_key(folder / "service-accounts.key", accounts)
    public = accounts.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "service-accounts.pub").write_bytes(public)
    for client, subject in CLIENTS.items():
        _write_client(folder, client, subject, server)


def write_client(folder: Path, authority: Path, name: str, subject: str, server: str) -> None:
    """Write NAME.kubeconfig into `folder`, with a certificate that the authority in the folder `authority` signs."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("ca.crt", "ca.key"):
        (folder / file).write_bytes((authority / file).read_bytes())
    _write_client(folder, name, subject, server)


def _write_client(folder: Path, name: str, subject: str, server: str) -> None:
    _sign(folder, name, subject, ExtendedKeyUsageOID.CLIENT_AUTH)
    (folder / f"{name}.kubeconfig").write_text(_kubeconfig(folder, name, server))


def _sign(folder: Path, name: str, subject: str, usage: x509.ObjectIdentifier, names: Sequence[str] = ()) -> None:
    """Write NAME.crt and NAME.key, signed by the authority in the folder. `names`: `DNS:…` and `IP:…`."""
    authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()).subject
    kinds = {"O": NameOID.ORGANIZATION_NAME, "CN": NameOID.COMMON_NAME}
    parts = (part.split("=", 1) for part in subject.strip("/").split("/"))
    key = ec.generate_private_key(ec.SECP256R1())
    made = _builder(x509.Name([x509.NameAttribute(kinds[kind], value) for kind, value in parts]), issuer, key, authority)
    made = made.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if names:
        made = made.add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
    _write_pair(folder, name, key, made.sign(authority, hashes.SHA256()))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, authority: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now, public = datetime.now(UTC), key.public_key()
    made = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    made = made.not_valid_before(now - BACKDATED).not_valid_after(now + VALID)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    return made.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)


def _general_name(name: str) -> x509.GeneralName:
    kind, _, value = name.partition(":")
    return x509.DNSName(value) if kind == "DNS" else x509.IPAddress(ipaddress.ip_address(value))


def _write_pair(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    _write_key(folder / f"{name}.key", key)
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.touch(mode=0o600)
    path.write_bytes(pem)


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
