"""TLS of the port for clients: a certificate that is renewed while the router runs. New connections get the new one, open ones go on."""

import logging
import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from cryptography import x509

from fairlead_router.file_follower import FileFollower

logger = logging.getLogger(__name__)


class ServerCertificate:
    """The certificate of `--ssl-certfile` and `--ssl-keyfile`. Files that do not fit together never take effect.

    Each version gets an SSLContext of its own. Loaded into a context that is in use, a certificate of another key type would be added to
    the old one instead of replacing it.
    """

    def __init__(self, certfile: str, keyfile: str, on_change: Callable[[float], None] = lambda expires: None) -> None:
        """`on_change`: called with the end of validity, in seconds since the epoch. Raises ValueError for files that cannot be used."""
        self._certfile, self._keyfile, self._on_change = Path(certfile), Path(keyfile), on_change
        try:
            first = self._read()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = str(error) or type(error).__name__
            raise ValueError(f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile} cannot be used: {why}") from error
        what, paths = f"certificate {certfile} with key {keyfile}", (self._certfile, self._keyfile)
        self._files = FileFollower(what, self._read, *paths, default=first, on_change=self._report_change)
        self.follow = self._files.follow
        self.context: ssl.SSLContext = _create_context()
        """For the listener. It answers no handshake itself: the newest version does."""
        self.context.sni_callback = self._choose_version

    def _read(self) -> tuple[ssl.SSLContext, datetime]:
        context = _create_context()
        # Without a password OpenSSL would ask for that of an encrypted key at the terminal.
        context.load_cert_chain(self._certfile, self._keyfile, password="")
        return context, x509.load_pem_x509_certificates(self._certfile.read_bytes())[0].not_valid_after_utc

    def _report_change(self, version: tuple[ssl.SSLContext, datetime]) -> None:
        _, expires = version
        self._on_change(expires.timestamp())
        logger.info("certificate %s, valid until %s", self._certfile, expires.isoformat())

    def _choose_version(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Select the newest version for a handshake. OpenSSL calls this for clients without SNI too."""
        connection.context, _ = self._files.content


def _create_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
