"""CURVE keys of the nodes of one group, derived from their shared secret. A peer without the secret can neither send nor receive.

ZeroMQ's CURVE (https://rfc.zeromq.org/spec/26/) encrypts and authenticates both ways; the leader accepts a single client key.
"""

import hmac
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85


@dataclass(frozen=True)
class Keys:
    """A key pair, in ZeroMQ's format."""

    public: bytes
    secret: bytes

    @classmethod
    def derive(cls, shared: str, role: str) -> "Keys":
        """Derive the pair of `role` ("leader", "node"): the same on every node."""
        secret = z85.encode(hmac.digest(shared.encode(), f"fairlead {role}".encode(), "sha256"))
        return cls(zmq.curve_public(secret), secret)


def secure_server(socket: "zmq.Socket[bytes]", shared: str) -> None:
    """Secure a socket that the leader binds. Its context needs an `authenticator`."""
    socket.curve_server = True
    socket.curve_secretkey = Keys.derive(shared, "leader").secret


def secure_client(socket: "zmq.Socket[bytes]", shared: str) -> None:
    """Secure a socket that a node connects with."""
    own = Keys.derive(shared, "node")
    socket.curve_serverkey = Keys.derive(shared, "leader").public
    socket.curve_publickey, socket.curve_secretkey = own.public, own.secret


def authenticator(context: "zmq.Context[zmq.Socket[bytes]]", shared: str) -> ThreadAuthenticator:
    """Start an authenticator that accepts the nodes' key. Its `stop` ends it."""
    started = ThreadAuthenticator(context)
    started.start()
    started.configure_curve_callback(credentials_provider=_Nodes(Keys.derive(shared, "node").public))
    return started


class _Nodes:
    """The credentials provider for `configure_curve_callback`."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether `key`, the client's key as Z85, is the nodes' key."""
        return hmac.compare_digest(z85.encode(key) if len(key) == 32 else key, self._key)
