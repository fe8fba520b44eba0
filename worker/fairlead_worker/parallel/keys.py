"""CURVE keys of the nodes of one group, made from the secret that they share: whoever does not have it is neither heard nor told anything.

ZeroMQ's CURVE (https://rfc.zeromq.org/spec/26/) encrypts and authenticates both ways; the leader takes one client key alone.
"""

import hmac
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85


@dataclass(frozen=True)
class Keys:
    """A pair, as ZeroMQ takes it."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, shared: str, role: str) -> "Keys":
        """Of `role` ("leader", "node"): the same on every node."""
        secret = z85.encode(hmac.digest(shared.encode(), f"fairlead {role}".encode(), "sha256"))
        return cls(zmq.curve_public(secret), secret)


def guard(socket: "zmq.Socket[bytes]", shared: str) -> None:
    """A socket that the leader binds. Its context needs an `authenticator`."""
    socket.curve_server = True
    socket.curve_secretkey = Keys.of(shared, "leader").secret


def unlock(socket: "zmq.Socket[bytes]", shared: str) -> None:
    """A socket that a node connects with."""
    own = Keys.of(shared, "node")
    socket.curve_serverkey = Keys.of(shared, "leader").public
    socket.curve_publickey, socket.curve_secretkey = own.public, own.secret


def authenticator(context: "zmq.Context[zmq.Socket[bytes]]", shared: str) -> ThreadAuthenticator:
    """Lets in who has the nodes' key. Ends with its `stop`."""
    made = ThreadAuthenticator(context)
    made.start()
    made.configure_curve_callback(credentials_provider=_Nodes(Keys.of(shared, "node").public))
    return made


class _Nodes:
    """What `configure_curve_callback` asks."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """`key`: of who wants to come in, as Z85."""
        return hmac.compare_digest(z85.encode(key) if len(key) == 32 else key, self._key)
