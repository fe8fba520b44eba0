"""Trust in routers that serve TLS: the batch server mounts their certificate, and accepts exactly that one.

Authorities and names decide nothing. So the certificate may be self-signed, or of a public issuer for the names of a gateway only.
"""

import ssl
from pathlib import Path
from typing import Final

_END: Final = "-----END CERTIFICATE-----"


class RouterCertificate:
    """The certificate in a file, which is read at each use: the kubelet updates it when the Secret changes."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._trusted: tuple[str, ...] = ()  # PEM, the newest first
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context for connections. Raises OSError, ValueError.

        It accepts the certificate before too, because routers may get the new one later.
        """
        # A chain follows the certificate. Its authorities must not be trusted, because no name is checked.
        leaf, end, _ = self._path.read_text().partition(_END)
        if not end:
            raise ValueError(f"{self._path} holds no certificate (PEM)")
        pem = f"{leaf}{end}\n"
        if self._context is None or self._trusted[0] != pem:
            trusted = (pem, *self._trusted[:1])
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(cadata="".join(trusted))
            self._trusted, self._context = trusted, context
        return self._context
