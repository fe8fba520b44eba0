"""The data of the operator's own Secret, and how a rotation changes it. Pure except for new keys and certificates.

A rotation keeps two values of each credential. Redis accepts both, and the services' Secrets contain the current one. The previous one is
dropped when Redis has accepted the current one and the kubelet has certainly updated every mounted file.
"""

import secrets
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime

from fairlead_operator.credentials import certificates
from fairlead_operator.credentials.certificates import Certificates

ROTATE = "fairlead.dev/rotate"  # annotation by which a user requests a rotation; removed when it starts
_FILES = {"authority": "ca.crt", "authority_key": "ca.key", "server": "tls.crt", "server_key": "tls.key"}


@dataclass(frozen=True)
class SecretData:
    """The keys of the Secret. `previous_…` are empty while no rotation is in progress."""

    installation: str  # distinguishes this installation's users from others' on a shared Redis
    key: str = field(repr=False)  # from which passwords of services are derived
    password: str = field(repr=False)  # of the administrator of the chart's Redis
    previous_key: str = field(default="", repr=False)
    previous_password: str = field(default="", repr=False)
    rotated_at: str = ""  # RFC 3339: the start of the last rotation
    certificates: Certificates | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, data: Mapping[str, str]) -> "SecretData | None":
        """Parse decoded `data`. Returns None where a required key is missing."""
        plain = {each.name: data.get(_key(each.name), "") for each in fields(cls) if each.name != "certificates"}
        if not (plain["installation"] and plain["key"] and plain["password"]):
            return None
        files = {name: data.get(file, "") for name, file in _FILES.items()}
        return cls(**plain, certificates=Certificates(**files) if all(files.values()) else None)

    def to_data(self) -> dict[str, str]:
        """Return the Secret's data, before base64. All keys are present, because an absent one removes nothing from a Secret."""
        plain = {_key(name): value for name, value in asdict(self).items() if name != "certificates"}
        return plain | ({_FILES[name]: value for name, value in asdict(self.certificates).items()} if self.certificates else {})

    @property
    def rotating(self) -> bool:
        return bool(self.previous_key)

    @property
    def credentials(self) -> frozenset[str]:
        """All credentials that Redis must accept."""
        return frozenset({self.key, self.password, self.previous_key, self.previous_password} - {""})


def _key(name: str) -> str:
    return name.replace("_", "-")


def next_secret_data(current: SecretData | None, *, rotate: bool, settled: Set[str], host: str, now: datetime) -> SecretData:
    """Return the next data of the Secret; `current` itself where nothing is due.

    `rotate`: a user requests it. `settled`: credentials that Redis has accepted for long enough that every mounted file has the current
    ones. `host`: the certificate's host; empty: none is wanted.
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
