"""TLS of the port for clients, on a real router process: the certificate changes without a restart and without a failed request."""

import asyncio
import datetime
import re
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.router.harness import Fleet, eventually
from tests.router.stand_in_worker import Exchange
from tests.router.test_process import refused, router_process, until_ready

from fairlead_common.http.connection_limiter import SPARE
from fairlead_router.wire.tls_listener import HANDSHAKE_SECONDS

NAME = "llm.example.com"
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


class Authority:
    """A certificate authority, and Secrets mounted the way the kubelet mounts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
        self.file = folder / "ca.crt"
        certificate = self._sign(self._key, self._name, None)
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    @property
    def certfile(self) -> str:
        return str(self.folder / "tls.crt")

    @property
    def keyfile(self) -> str:
        return str(self.folder / "tls.key")

    def mount(self, key: Key | None = None) -> int:
        """Issue a certificate and replace the mounted Secret by it in one step. Return the certificate's serial number."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(key, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)]), NAME)
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.swap(certificate.public_bytes(serialization.Encoding.PEM), private)
        return certificate.serial_number

    def swap(self, certificate: bytes, private: bytes) -> None:
        """Mount these bytes: a new folder, and then the symbolic link `..data` to it, as the kubelet does."""
        self._count += 1
        version = self.folder / f"..version-{self._count}"
        version.mkdir()
        (version / "tls.crt").write_bytes(certificate)
        (version / "tls.key").write_bytes(private)
        link = self.folder / "..new"
        link.symlink_to(version.name)
        link.replace(self.folder / "..data")
        for name in ("tls.crt", "tls.key"):
            if not (self.folder / name).exists():
                (self.folder / name).symlink_to(f"..data/{name}")

    def _sign(self, key: Key, subject: x509.Name, host: str | None) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        )
        if host is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def tls_router(authority: Authority, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, list[str]]]:
    """Yield the process of a router with TLS, its port, and the lines it has written."""
    async with router_process("--ssl-certfile", authority.certfile, "--ssl-keyfile", authority.keyfile, *flags) as (process, url, lines):
        assert url.startswith("https://")
        yield process, int(url.rsplit(":", 1)[1]), lines


def trust(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.file)


def client_of(authority: Authority, port: int, **settings: object) -> httpx.AsyncClient:
    """Return a client that verifies the certificate for NAME, while it connects to 127.0.0.1."""
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trust(authority), timeout=30, **settings)  # type: ignore[arg-type]


EXTENSIONS = {"extensions": {"sni_hostname": NAME}, "headers": {"host": NAME}}


async def serial(port: int, *, name: str | None = NAME) -> int:
    """Return the serial number of the certificate that a new connection gets. `name`: None sends no SNI."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name or "")
    found = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True)).serial_number
    writer.close()
    return found


async def test_a_renewed_certificate_takes_effect_without_a_restart_and_no_request_fails(fleet: Fleet, authority: Authority) -> None:
    gate = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("one")
        if b"hold me" in exchange.request.body:
            await gate.wait()
        await exchange.event("two")
        await exchange.end()

    worker = await fleet.worker(behaviour=waits)
    first = authority.mount(rsa.generate_private_key(65537, 2048))
    flags = ["--workers", f"static://{worker.address}", "--poll-interval", "0.1"]
    async with tls_router(authority, *flags) as (process, port, _), client_of(authority, port) as client:

        async def ready() -> bool:
            return (await client.get("/ready", **EXTENSIONS)).status_code == 200

        await eventually(ready, "the router is ready")
        served: set[int] = set()
        statuses: list[int] = []
        stopping = asyncio.Event()

        async def load(connections: str) -> None:
            """Send requests without a pause: over one connection, or each over a new one."""
            limits = httpx.Limits(max_keepalive_connections=1 if connections == "kept" else 0)
            async with client_of(authority, port, limits=limits) as one:
                while not stopping.is_set():
                    body = {"model": "stand-in", "prompt": "hello", "stream": True}
                    async with one.stream("POST", "/v1/completions", json=body, **EXTENSIONS) as answer:
                        text = await answer.aread()
                        served.add(x509.load_der_x509_certificate(_peer(answer)).serial_number)
                    statuses.append(answer.status_code if text.endswith(b"data: [DONE]\n\n") else 0)

        held = client.stream("POST", "/v1/completions", json={"model": "stand-in", "prompt": "hold me", "stream": True}, **EXTENSIONS)
        async with held as stream:
            pieces = stream.aiter_bytes()
            assert b"one" in await anext(pieces)
            tasks = [asyncio.create_task(load(kind)) for kind in ("kept", "new", "new")]
            serials = [first]
            for key in (None, rsa.generate_private_key(65537, 2048)):  # also from one key type to another
                before = len(statuses)
                await eventually(lambda before=before: len(statuses) > before + 3, "requests under the present certificate")
                serials.append(authority.mount(key))

                async def renewed() -> bool:
                    return await serial(port) == serials[-1] and await serial(port, name=None) == serials[-1]

                await eventually(renewed, "new connections get the new certificate", 10)
            before = len(statuses)
            await eventually(lambda: len(statuses) > before + 5, "requests under the last certificate")
            stopping.set()
            await asyncio.gather(*tasks)
            gate.set()
            assert b"".join([piece async for piece in pieces]).endswith(b"data: [DONE]\n\n"), "a stream outlives its certificate"
        assert set(statuses) == {200} and len(statuses) > 20
        assert served == set(serials), "requests before and after each change"
        metrics = (await client.get("/metrics", **EXTENSIONS)).text
        expiry = re.search(r"^fairlead_router_certificate_expiry_timestamp_seconds (\S+)$", metrics, re.M)
        assert expiry is not None and 0 < float(expiry[1]) - time.time() <= 86_400
        assert process.returncode is None


def _peer(answer: httpx.Response) -> bytes:
    der = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert isinstance(der, bytes)
    return der


async def test_files_that_do_not_fit_together_never_take_effect(
    fleet: Fleet, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    first = authority.mount()
    certificate, private = Path(authority.certfile).read_bytes(), Path(authority.keyfile).read_bytes()
    router = await fleet.router(await fleet.worker(), ssl_certfile=authority.certfile, ssl_keyfile=authority.keyfile)
    assert await serial(router.port) == first
    second = authority.mount()
    await eventually(lambda: _is(router.port, second), "the second certificate")
    for times, pair in enumerate(((certificate, Path(authority.keyfile).read_bytes()), (b"", private)), 1):
        authority.swap(*pair)
        await eventually(lambda: caplog.text.count("cannot be used") == times, "the log says so")  # noqa: B023  # over immediately
        assert await serial(router.port) == second
    assert f"certificate {authority.certfile} with key {authority.keyfile} cannot be used" in caplog.text
    authority.swap(certificate, private)
    await eventually(lambda: _is(router.port, first), "a valid pair again")


async def _is(port: int, number: int) -> bool:
    return await serial(port) == number


async def test_bodies_refusals_and_plain_clients_on_a_tls_port(fleet: Fleet, authority: Authority) -> None:
    worker = await fleet.worker()
    authority.mount()
    flags = ["--workers", f"static://{worker.address}", "--poll-interval", "0.1", "--admin-port", "0"]
    async with tls_router(authority, *flags) as (_, port, lines), client_of(authority, port) as client:
        admin = next(line for line in lines if "admin paths on" in line).rsplit(":", 1)[1].strip()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin}") as probes:  # the kubelet's probes stay plain
            await until_ready(probes, 200)
        large = {"model": "stand-in", "prompt": "x", "padding": "x" * 3_000_000}
        assert (await client.post("/v1/completions", json=large, **EXTENSIONS)).status_code == 200
        assert len(worker.received[-1].body) > 3_000_000
        context = trust(authority)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)
        writer.write(b"NONSENSE\r\n\r\n")
        async with asyncio.timeout(10):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400") and b"not HTTP" in answer, "a refusal reaches the client"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            assert b"HTTP/1.1 200" not in await reader.read()
        writer.close()
        assert (await client.get("/health", **EXTENSIONS)).status_code == 200


async def test_handshakes_count_as_connections(fleet: Fleet, authority: Authority) -> None:
    """Clients that send nothing hold no more sockets than on a plain port: the limit, and 64 for probes."""
    authority.mount()
    worker = await fleet.worker()
    flags = ["--workers", f"static://{worker.address}", "--max-connections", "10"]
    async with tls_router(authority, *flags) as (process, port, _):
        descriptors = Path(f"/proc/{process.pid}/fd")
        before = len(list(descriptors.iterdir()))
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        closed = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await eventually(lambda: sum(task.done() for task in closed) == 200 - 10 - SPARE, "the others are closed", HANDSHAKE_SECONDS - 1)
        assert len(list(descriptors.iterdir())) - before <= 10 + SPARE + 10  # and a few to the worker
        for _, writer in silent[:100]:
            writer.close()
        await eventually(lambda: all(task.done() for task in closed), "the others time out", HANDSHAKE_SECONDS + 2)
        async with client_of(authority, port) as client:
            assert (await client.get("/health", **EXTENSIONS)).status_code == 200, "their places are free again"
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-certfile", "{folder}/tls.crt"], "--ssl-certfile and --ssl-keyfile go together"),
        (["--ssl-certfile", "{folder}/none.crt", "--ssl-keyfile", "{folder}/tls.key"], "none.crt with --ssl-keyfile"),
        (["--ssl-certfile", "{folder}/tls.key", "--ssl-keyfile", "{folder}/tls.key"], "cannot be used"),
    ],
)
def test_a_certificate_that_cannot_be_used_ends_the_start(
    authority: Authority, flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority.mount()
    refused(monkeypatch, "--workers", "static://127.0.0.1:1", *(flag.format(folder=authority.folder) for flag in flags))
    assert words in capsys.readouterr().err
