"""All spellings of a path that some server reads as an admin path, and a request that is sent unnormalised."""

import socket
from collections.abc import Iterator

WORKER = (
    "/metrics",
    "/load",
    "/internal/prompt-format",
    "/internal/hot-prefixes/16",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/server_info",
    "/tokenizer_info",
    "/reset_prefix_cache",
    "/internal/schedule",
)
ROUTER = ("/metrics", "/fairlead/workers", "/fairlead/split", "/fairlead/demand", "/fairlead/probe", "/fairlead/score")


def variants(path: str) -> Iterator[str]:
    """Return the path itself and every spelling that decodes, normalises or case-folds to it."""
    letter = path.rindex("/") + 1
    yield path
    yield f"{path[:letter]}%{ord(path[letter]):02x}{path[letter + 1 :]}"
    yield f"{path[:letter]}%25{ord(path[letter]):02x}{path[letter + 1 :]}"
    yield f"/v1/models/..{path}"
    yield f"/v1/models/../..{path}"
    yield f"/v1/models/%2e%2e/%2e%2e{path}"
    yield f"/v1/completions/../..{path}"
    yield f"/.{path}"
    yield f"/{path}"
    yield f"{path}/"
    yield path.upper()
    yield f"{path};x=1"
    yield f"{path}?model=m"
    yield f"http://127.0.0.1{path}"
    yield f"http://127.0.0.1/v1/models/..{path}"


def status(port: int, target: str, method: str = "GET") -> int:
    """Return the status of a request for `target`, sent exactly as given: HTTP clients would normalise it."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        lines = [f"{method} {target} HTTP/1.1", "host: x", "content-length: 2", "connection: close", "", "{}"]
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.makefile("rb").readline().split()[1])
