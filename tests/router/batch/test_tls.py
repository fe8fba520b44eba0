"""Lines over TLS: the batch server accepts the routers' own certificate, and no other."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web
from tests.router.batch.deployment import Deployment, create, line, results, wait
from tests.router.wire.test_tls import Authority

from fairlead_router.batch.line_client import Answer, LineClient, Retry
from fairlead_router.batch.router_certificate import RouterCertificate
from fairlead_router.batch.validation import Line
from fairlead_router.tenancy.shared_secret import SharedSecret

LINE = Line("a", "POST", "/v1/completions", msgspec.Raw(b'{"prompt": "x"}'))


@asynccontextmanager
async def router(certificate: Path, key: Path) -> AsyncIterator[str]:
    """A server with the certificate that the files hold now, whose later connections use it too."""

    async def complete(_: web.Request) -> web.Response:
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def send(url: str, certificate: RouterCertificate) -> Answer | Retry:
    async with LineClient(url, SharedSecret(""), certificate) as client:
        return await client.send("", "/v1/completions", "id", LINE, 0, 0)


async def test_the_mounted_certificate_is_accepted_without_its_authority_or_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.mount()
    trusted = RouterCertificate(authority.certfile)
    async with router(tmp_path / "tls.crt", tmp_path / "tls.key") as url:
        assert isinstance(await send(url, trusted), Answer)
        authority.mount()
        assert isinstance(await send(url, trusted), Answer), "the router gets a renewed certificate later"
    async with router(tmp_path / "tls.crt", tmp_path / "tls.key") as url:
        assert isinstance(await send(url, trusted), Answer)


async def test_another_certificate_of_the_same_authority_is_refused_and_the_line_sent_again(tmp_path: Path) -> None:
    """Its chain follows a certificate in `tls.crt`. The authority must not be trusted: it signs certificates of others too."""
    (tmp_path / "ours").mkdir()
    authority = Authority(tmp_path)
    authority.mount()
    ours = tmp_path / "ours" / "tls.crt"
    ours.write_bytes((tmp_path / "tls.crt").read_bytes() + authority.file.read_bytes())
    authority.mount()
    async with router(tmp_path / "tls.crt", tmp_path / "tls.key") as url:
        refused = await send(url, RouterCertificate(str(ours)))
    assert isinstance(refused, Retry) and "certificate" in refused.reason.lower() and not refused.is_failure


def test_a_batch_runs_through_a_router_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.mount()
    with Deployment(tmp_path, tls=tmp_path) as running:
        client = running.client()
        batch = wait(client, create(client, [line(str(number)) for number in range(3)]))
        assert batch.status == "completed" and results(client, batch.output_file_id).keys() == {"0", "1", "2"}


async def test_an_incomplete_file_delays_the_line(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("-----BEGIN CERT")
    late = await send("https://127.0.0.1:1", RouterCertificate(str(tmp_path / "tls.crt")))
    assert isinstance(late, Retry) and "holds no certificate" in late.reason
