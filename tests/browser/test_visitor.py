"""Each fault of a page is found: a page without it has no problem, and the page with it has that one."""

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser
from tests.browser.visitor import NOW, visit

pytestmark = pytest.mark.asyncio(loop_scope="session")
STYLE = "<style>a:focus { outline: 2px solid red }</style>"
POLICY = '<meta http-equiv="Content-Security-Policy" content="script-src \'none\'">'
FAULTS = {
    "console": ("<script>console.error('broken')</script>", "console error: broken"),
    "exception": ("<script>throw new Error('broken')</script>", "uncaught error: broken"),
    "script-host": ('<script src="http://cdn.example/x.js"></script>', "request to another host: http://cdn.example/x.js"),
    "image-host": ('<img src="https://img.example/x.png">', "request to another host: https://img.example/x.png"),
    "other-port": ('<img src="http://127.0.0.1:1/x.png">', "request to another host: http://127.0.0.1:1/x.png"),
    "font-host": (
        "<style>@font-face { font-family: F; src: url(http://font.example/f) } p { font-family: F }</style><p>text</p>",
        "request to another host: http://font.example/f",
    ),
    "fetch-host": ("<script>fetch('http://api.example/').catch(() => 0)</script>", "request to another host: http://api.example/"),
    "policy": (f"{POLICY}<script>1</script>", "script-src"),
    "policy-handler": (f'{POLICY}<body onload="1">', "script-src"),
    "missing": ('<img src="/missing.png">', "404 "),
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def origin(folder: Path) -> Iterator[str]:
    """A server of the folder's pages."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def write(folder: Path, body: str) -> None:
    (folder / "page.html").write_text(f"<!doctype html><html lang=en><meta charset=utf-8><title>page</title>{body}")


async def test_a_correct_page_has_no_problem(browser: Browser, folder: Path, origin: str) -> None:
    write(folder, STYLE + '<p>text</p><img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><a href="#a">one</a><a href="#b">two</a>')
    async with visit(browser, origin) as visitor:
        await visitor.open("/page.html", width=360)
        assert await visitor.find_overflow() == []
        assert await visitor.tab_through() == ["one", "two"]
        assert visitor.problems == []


@pytest.mark.parametrize(("body", "problem"), FAULTS.values(), ids=FAULTS)
async def test_a_fault_is_found(browser: Browser, folder: Path, origin: str, body: str, problem: str) -> None:
    write(folder, body)
    async with visit(browser, origin) as visitor:
        await visitor.open("/page.html")
        assert any(problem in each for each in visitor.problems), visitor.problems


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<div style="width: 500px">wide</div>', '<div style="width: 500px">wide</div>'),
        ("<p>" + "w" * 200, "wider than the window"),
        ("<style>body::after { content: ''; position: absolute; left: 600px; width: 9px; height: 9px }</style>", "wider than the window"),
    ],
    ids=["box", "word", "generated"],
)
async def test_a_page_wider_than_the_window_is_found(browser: Browser, folder: Path, origin: str, body: str, found: str) -> None:
    write(folder, body)
    async with visit(browser, origin) as visitor:
        await visitor.open("/page.html", width=360)
        over = await visitor.find_overflow()
        assert over and found[:50] in over[0], over


async def test_a_box_that_scrolls_by_itself_is_no_overflow(browser: Browser, folder: Path, origin: str) -> None:
    write(folder, '<div style="overflow-x: auto"><div style="width: 900px">table</div></div>')
    async with visit(browser, origin) as visitor:
        await visitor.open("/page.html", width=360)
        assert await visitor.find_overflow() == []


async def test_focus_that_cannot_be_seen_is_found(browser: Browser, folder: Path, origin: str) -> None:
    write(folder, '<style>a:focus { outline: none }</style><a href="#a">hidden</a>')
    async with visit(browser, origin) as visitor:
        await visitor.open("/page.html")
        assert await visitor.tab_through() == ["hidden"]
        assert visitor.problems == ["focus cannot be seen: hidden"]


async def test_visitors_share_nothing(browser: Browser, folder: Path, origin: str) -> None:
    write(folder, "<script>const before = document.cookie; document.cookie = 'seen=1'</script>")
    for _ in range(2):
        async with visit(browser, origin) as visitor:
            page = await visitor.open("/page.html")
            assert await page.evaluate("before") == ""


async def test_a_frozen_page_gives_the_same_screenshot_twice(browser: Browser, folder: Path, origin: str) -> None:
    write(
        folder,
        "<style>@keyframes move { to { margin-left: 300px } } p { animation: move 1s infinite }</style>"
        "<p id=p></p><input autofocus><script>p.textContent = new Date().toISOString()</script>",
    )
    shots = []
    for _ in range(2):
        async with visit(browser, origin) as visitor:
            await visitor.freeze()
            page = await visitor.open("/page.html", width=400, height=300)
            assert await page.inner_text("#p") == NOW.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            shots.append(await visitor.screenshot())
    assert shots[0] == shots[1]
