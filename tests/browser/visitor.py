"""Pages in a headless Chromium, as a user sees them, with everything recorded that a correct page never does.

The driver is Playwright with Debian's Chromium: it waits for elements, holds the clock, isolates contexts, and reports console messages,
requests and errors. It takes 161 MB on disk and 0.3 s to start. Selenium also needs Debian's `chromium-driver`, and reports requests only
through DevTools' protocol. That protocol alone needs no package, but some hundreds of lines of our own for waiting, input and the clock.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from urllib.parse import urlsplit

from playwright.async_api import Browser, ConsoleMessage, Page, Request, Response, async_playwright
from tests.servers import chromium

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
"""What `Date` says in a page whose clock stands still."""
INLINE = ("about", "blob", "data")
"""Schemes that load nothing from a host."""
LEFT_AND_RIGHT = """() => {
  const width = document.documentElement.clientWidth
  const clipped = element => {
    for (let above = element.parentElement; above; above = above.parentElement)
      if (getComputedStyle(above).overflowX !== 'visible' && above !== document.body && above !== document.documentElement) return true
  }
  return [...document.body.querySelectorAll('*')]
    .filter(element => element.getBoundingClientRect().right > width + 1 && !clipped(element))
    .slice(0, 10)
    .map(element => element.outerHTML.slice(0, 120))
}"""
"""Return the first elements that reach over the right edge, apart from those in a box that scrolls by itself."""
FOCUSED = """() => {
  const element = document.activeElement
  if (!element || element === document.body) return null
  const style = getComputedStyle(element)
  const visible = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0 || style.boxShadow !== 'none'
  const label = element.getAttribute('aria-label') || element.labels?.[0]?.innerText || element.innerText
  return [(label || element.name || element.tagName).trim(), visible]
}"""


@asynccontextmanager
async def start_browser() -> AsyncIterator[Browser]:
    """Run one browser that resolves no names. Chromium's sandbox refuses to run as root, and the pages are our own."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium.launcher(),
            chromium_sandbox=False,
            args=["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--no-proxy-server"],
        )
        try:
            yield browser
        finally:
            await browser.close()


class Visitor:
    """One user: own cookies and storage. `problems` has a line for each fault of the pages so far."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page, self.problems = page, list[str]()
        self._origin = origin
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(f"uncaught error: {error}"))
        page.on("request", self._on_request)
        page.on("response", self._on_response)
        page.on("websocket", lambda socket: self._check_origin(socket.url.replace("ws", "http", 1)))

    async def open(self, path: str, width: int = 1280, height: int = 800) -> Page:
        """Open a path of the server in a window of this size, and return when the page and what it loads are there."""
        await self.page.set_viewport_size({"width": width, "height": height})
        response = await self.page.goto(self._origin + path, wait_until="load")
        assert response is not None
        return self.page

    async def freeze(self) -> None:
        """Hold the clock at `NOW` in the pages opened from now on, so that a screenshot shows the same times each time."""
        await self.page.clock.set_fixed_time(NOW)

    async def find_overflow(self) -> list[str]:
        """Return what makes the page scroll sideways; empty if it does not."""
        over: list[str] = await self.page.evaluate(LEFT_AND_RIGHT)
        scrolls = await self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        return over or (["the page is wider than the window"] if scrolls else [])

    async def tab_through(self, limit: int = 100) -> list[str]:
        """Press Tab until the focus leaves the page. Return what got the focus, in order; focus that cannot be seen is a problem."""
        stops: list[str] = []
        for _ in range(limit):
            await self.page.keyboard.press("Tab")
            focused = await self.page.evaluate(FOCUSED)
            if focused is None:
                return stops
            label, is_visible = focused
            stops.append(label)
            if not is_visible:
                self.problems.append(f"focus cannot be seen: {label}")
        return stops

    async def hide(self, selector: str) -> None:
        """Make the text of the selected elements invisible, if there are any. What is around them stays where it is."""
        await self.page.locator(selector).evaluate_all("all => all.forEach(each => { each.style.visibility = 'hidden' })")

    async def screenshot(self) -> bytes:
        """Return the window as a PNG, without animations and caret."""
        return await self.page.screenshot(animations="disabled", caret="hide", scale="css")

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):  # violations of the content security policy are errors
            self.problems.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        self._check_origin(request.url)

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status} {response.url}")

    def _check_origin(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in INLINE and f"{parts.scheme}://{parts.netloc}" != self._origin:
            self.problems.append(f"request to another host: {url}")


@asynccontextmanager
async def visit(browser: Browser, origin: str, headers: Mapping[str, str] | None = None, dark: bool = False) -> AsyncIterator[Visitor]:
    """Provide a new user of the server at `origin` (`http://127.0.0.1:PORT`). headers: sent with each request, such as a key."""
    context = await browser.new_context(
        locale="en-US",
        timezone_id="UTC",
        reduced_motion="reduce",
        color_scheme="dark" if dark else "light",
        extra_http_headers=dict(headers or {}),
    )
    try:
        yield Visitor(await context.new_page(), origin)
    finally:
        await context.close()
