"""TLS of the picker's port. Gateways of the inference extension use TLS to a picker, and do not verify it unless configured to."""

import datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

YEARS = 10


def load_credentials(tls: str) -> grpc.ServerCredentials | None:
    """Return the server's credentials: None for `off`, a generated key for `self-signed`, else those of a folder.

    The folder holds `tls.crt` and `tls.key`, as in a mounted Kubernetes Secret. It is read again for each new connection, so a renewed
    certificate needs no restart. Raises OSError, ValueError.
    """
    if tls == "off":
        return None
    if tls == "self-signed":
        key, certificate = generate_certificate()
        return grpc.ssl_server_credentials([(key, certificate)])
    folder = Path(tls)
    first = _read(folder)
    last = first

    def reload() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        try:
            now = _read(folder)
        except (OSError, ValueError):
            return None  # the folder is being updated: keep the last certificate
        if now == last:
            return None
        last = now
        return grpc.ssl_server_certificate_configuration([now])

    return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([first]), reload)


def generate_certificate() -> tuple[bytes, bytes]:
    """Return a private key and its certificate, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fairlead-endpoint-picker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(serialization.Encoding.PEM)


def _read(folder: Path) -> tuple[bytes, bytes]:
    key, certificate = (folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes()
    serialization.load_pem_private_key(key, None)
    x509.load_pem_x509_certificates(certificate)
    return key, certificate
