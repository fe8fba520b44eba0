"""What the operator's own Secret holds, and how a rotation changes it. Pure but for new keys and certificates.

A rotation keeps two values of each credential: Redis accepts both, Secrets of services carry the current one. The previous one is dropped
when Redis has accepted the current one and the kubelet has certainly renewed every mounted file.
"""

import secrets
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime

from fairlead_operator.credentials import certificates
from fairlead_operator.credentials.certificates import Certificates

ROTATE = "fairlead.dev/rotate"  # annotation by which a person asks for a rotation; removed when it begins
_FILES = {"authority": "ca.crt", "authority_key": "ca.key", "server": "tls.crt", "server_key": "tls.key"}


@dataclass(frozen=True)
class SecretData:
    """The keys of the Secret. Empty `previous…`: no rotation is under way."""

    installation: str  # tells this installation's users from those of others on a shared Redis
    key: str = field(repr=False)  # from which passwords of services are derived
    password: str = field(repr=False)  # of the administrator of the chart's Redis
    previous_key: str = field(default="", repr=False)
    previous_password: str = field(default="", repr=False)
    rotated_at: str = ""  # RFC 3339: when the last rotation began
    certificates: Certificates | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, data: Mapping[str, str]) -> "SecretData | None":
        """Return what decoded `data` says; None where a required key is missing."""
        plain = {each.name: data.get(_key(each.name), "") for each in fields(cls) if each.name != "certificates"}
        if not (plain["installation"] and plain["key"] and plain["password"]):
            return None
        files = {name: data.get(file, "") for name, file in _FILES.items()}
        return cls(**plain, certificates=Certificates(**files) if all(files.values()) else None)

    def to_data(self) -> dict[str, str]:
        """Return the Secret's data, before base64. An empty value removes nothing from a Secret, so all keys are always there."""
        plain = {_key(name): value for name, value in asdict(self).items() if name != "certificates"}
        return plain | ({_FILES[name]: value for name, value in asdict(self.certificates).items()} if self.certificates else {})

    @property
    def rotating(self) -> bool:
        return bool(self.previous_key)

    @property
    def credentials(self) -> frozenset[str]:
        """All that Redis has to accept."""
        return frozenset({self.key, self.password, self.previous_key, self.previous_password} - {""})


def _key(name: str) -> str:
    return name.replace("_", "-")


def next_secret_data(current: SecretData | None, *, rotate: bool, settled: Set[str], host: str, now: datetime) -> SecretData:
    """Return what the Secret should hold next; `held` itself where nothing is due.

    `rotate`: a person asks for it. `settled`: credentials that Redis has accepted for so long that every mounted file holds the current
    ones. `host`: for which a certificate is wanted; empty: none is.
    """
    if current is None:
        current = SecretData(secrets.token_hex(4), secrets.token_hex(32), secrets.token_hex(32))
    elif current.rotating and current.credentials <= settled:
        current = replace(current, previous_key="", previous_password="")
    elif rotate and not current.rotating:
        current = replace(
            current,
            key=secrets.token_hex(32),
            password=secrets.token_hex(32),
            previous_key=current.key,
            previous_password=current.password,
            rotated_at=now.isoformat(timespec="seconds"),
            certificates=certificates.issue(host, now, current.certificates) if host else None,
        )
    if host and (current.certificates is None or certificates.is_due(current.certificates, host, now)):
        current = replace(current, certificates=certificates.issue(host, now, current.certificates))
    return current
