"""TLS of the port for clients: a certificate that is renewed while the router runs. New connections get the new one, open ones go on."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from cryptography import x509

from fairlead_router.file_follower import FileFollower

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0


class ServerCertificate:
    """The certificate of `--ssl-certfile` and `--ssl-keyfile`. Files that do not fit together never take effect.

    Each version gets an SSLContext of its own. Loaded into a context that is in use, a certificate of another key type would be added to
    the old one instead of replacing it.
    """

    def __init__(self, certfile: str, keyfile: str, on_change: Callable[[float], None] = lambda expires: None) -> None:
        """`on_change`: called with the end of validity, in seconds since the epoch. Raises ValueError for files that cannot be used."""
        self._certfile, self._keyfile, self._on_change = Path(certfile), Path(keyfile), on_change
        self._files = FileFollower(self._read, self._certfile, self._keyfile)
        self._current: ssl.SSLContext | None = None
        self._problem = ""
        self.reload()
        if self._current is None:
            raise ValueError(f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile} cannot be used: {self._problem}")
        self.context: ssl.SSLContext = _create_context()
        """For the listener. It answers no handshake itself: the newest version does."""
        self.context.sni_callback = self._choose_version

    def reload(self) -> None:
        """Read the files if they have changed."""
        try:
            loaded = self._files.poll()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = str(error) or type(error).__name__
            if self._current is not None and why != self._problem:
                logger.error("certificate %s cannot be used: %s; the one read before stays in use", self._certfile, why)
            self._problem = why
            return
        if loaded is None:
            return
        self._current, expires = loaded
        self._problem = ""
        self._on_change(expires.timestamp())
        logger.info("certificate %s, valid until %s", self._certfile, expires.isoformat())

    def _read(self) -> tuple[ssl.SSLContext, datetime]:
        context = _create_context()
        # Without a password OpenSSL would ask for that of an encrypted key at the terminal.
        context.load_cert_chain(self._certfile, self._keyfile, password="")
        return context, x509.load_pem_x509_certificates(self._certfile.read_bytes())[0].not_valid_after_utc

    async def follow(self) -> None:
        """Reload the files while they change, without end."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            await asyncio.to_thread(self.reload)

    def _choose_version(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Select the newest version for a handshake. OpenSSL calls this for clients without SNI too."""
        assert self._current is not None
        connection.context = self._current


def _create_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
