"""The certificate of the chart's Redis, signed by the installation's own authority."""

import ipaddress
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE = timedelta(days=3650)
SERVER_LIFE = timedelta(days=365)
RENEW_BEFORE = timedelta(days=120)  # before the end of SERVER_LIFE
SKEW = timedelta(hours=1)  # a client's clock may be behind ours


@dataclass(frozen=True)
class Certificates:
    """PEM texts. Clients trust `authority`; `authority_key` signs the next server certificate."""

    authority: str
    authority_key: str
    server: str
    server_key: str


def issue(host: str, now: datetime, authority: Certificates | None = None) -> Certificates:
    """Return a new server certificate for `host` (a DNS name or an IP address), signed by `authority` or by a new one."""
    if authority is None:
        signing_key = ec.generate_private_key(ec.SECP256R1())
        ca = _authority(signing_key, now)
    else:
        ca = x509.load_pem_x509_certificate(authority.authority.encode())
        signing_key = _private_key(authority.authority_key)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name("fairlead redis"))  # a common name has at most 64 characters; clients verify the alternative name
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(min(now + SERVER_LIFE, ca.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        .sign(signing_key, hashes.SHA256())
    )
    return Certificates(_pem(ca), _pem_key(signing_key), _pem(certificate), _pem_key(key))


def is_due(held: Certificates, host: str, now: datetime) -> bool:
    """Return whether the server certificate expires soon, names another host, or cannot be read."""
    try:
        server = x509.load_pem_x509_certificate(held.server.encode())
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return True
    return now > server.not_valid_after_utc - RENEW_BEFORE or list(names) != [_alternative(host)]


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_name("fairlead redis authority"))
        .issuer_name(_name("fairlead redis authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not an elliptic-curve key")
    return key


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem_key(key: ec.EllipticCurvePrivateKey) -> str:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem.decode()
