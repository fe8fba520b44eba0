"""The batch server's process: it listens on both families, as pods of clusters with IPv6 alone need it, logs JSON, and no request."""

import json
import socket
import sys
from pathlib import Path

import pytest
from tests.servers.redis_server import free_port
from tests.system.processes import Process, until


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this machine")
def test_it_listens_on_ipv4_and_ipv6(tmp_path: Path) -> None:
    port = free_port()
    flags = [f"--storage=file://{tmp_path}/storage", "--router-url=http://127.0.0.1:1", f"--port={port}", "--log-format=json"]
    server = Process("batch", [sys.executable, "-m", "fairlead_router.batch.main", *flags], tmp_path / "log")
    try:
        server.start()
        until(lambda: connects("127.0.0.1", port), "the batch server listens")
        assert connects("::1", port)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"GET /v1/files?after=hidden{'x' * 9000} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert b" 431 " in connection.recv(4096)
        lines = (tmp_path / "log").read_text().splitlines()
        assert lines and all(json.loads(line)["message"] for line in lines), "--log-format json"
        assert "LineTooLong" in lines[-1] and not any("hidden" in line or "Traceback" in line for line in lines)
    finally:
        server.kill()
