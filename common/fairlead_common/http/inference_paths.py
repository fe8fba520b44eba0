"""The paths open to clients, and the address where a worker serves all other paths."""

from urllib.parse import unquote

from fairlead_common.protocols.paths import COMPUTED, TOKENIZED

MODELS = "/v1/models"
INFERENCE = (*COMPUTED, *TOKENIZED, MODELS)
"""Besides these: `/v1/models/NAME`."""


def is_inference(target: str) -> bool:
    """Return whether `target`, a request's raw path, is an inference path in its canonical form.

    Servers interpret `%6c`, `//`, `..` and upper case differently. Only a path that all of them interpret equally is an inference path.
    """
    if target in INFERENCE:
        return True
    name = unquote(target.removeprefix(f"{MODELS}/"))  # clients may send `org/name` as `org%2Fname`
    if not target.startswith(f"{MODELS}/") or not name.isprintable():
        return False
    return not any(part in ("", ".", "..") or "%" in part or "\\" in part for part in name.split("/"))


def with_port(address: str, port: int | None) -> str:
    """Return `address` (host:port) with another port; unchanged where `port` is None."""
    return address if port is None else f"{address.rpartition(':')[0]}:{port}"
