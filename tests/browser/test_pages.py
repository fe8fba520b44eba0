"""Pages of a real worker and router in a browser, and the screenshots of them in the documentation."""

import pytest
from playwright.async_api import Browser
from tests.api.fleet import Pair
from tests.browser.conftest import Visit
from tests.browser.screenshots import ASSETS, LARGEST, SHOTS, Shot, png_size, take

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("browser")]  # the browser first: without it nothing starts
OPEN_ALL = """() => {
  document.querySelectorAll('details').forEach(each => { each.open = true })
  return Object.fromEntries([...document.querySelectorAll('details:has(> summary > .method)')].map(
    each => [each.id, [each.querySelector('summary').innerText, each.querySelector('table').offsetHeight]]))
}"""
"""Open every part of the page. Return the title and the height in pixels of each operation's table, by operationId."""


@pytest.mark.parametrize("server", [0, 1], ids=["worker", "router"])
async def test_the_reference_shows_every_operation_in_a_wide_and_a_narrow_window(pair: Pair, new_visitor: Visit, server: int) -> None:
    visitor = await new_visitor(pair.urls[server])
    operations = {
        each["operationId"]: f"{method.upper()} {path}"
        for path, methods in pair.worker.client.get("/openapi.json").json()["paths"].items()
        for method, each in methods.items()
    }
    assert "POST /v1/chat/completions" in operations.values()
    for width in (1280, 360):
        page = await visitor.open("/docs", width)
        shown = await page.evaluate(OPEN_ALL)
        for name, call in operations.items():
            title, height = shown[name]
            assert title.startswith(call)
            assert height > 0
        assert await visitor.find_overflow() == []
        assert await page.locator("script").count() == 0


async def test_the_reference_opens_with_the_keyboard(pair: Pair, new_visitor: Visit) -> None:
    visitor = await new_visitor(pair.urls[1])
    page = await visitor.open("/docs")
    first = page.locator("details").first
    await first.locator("summary").focus()
    await page.keyboard.press("Enter")
    assert await first.locator("table").is_visible()
    await visitor.tab_through()


@pytest.mark.parametrize("shot", SHOTS, ids=[shot.name for shot in SHOTS])
async def test_a_screenshot_can_be_made_and_has_the_size_of_the_committed_one(browser: Browser, pair: Pair, shot: Shot) -> None:
    png = await take(browser, pair.urls[1], shot)
    committed = shot.file.read_bytes()
    assert png_size(png) == png_size(committed) == (shot.width, shot.height)
    assert len(committed) <= LARGEST
    assert len(committed) / 2 <= len(png) <= 2 * len(committed), "the page has changed much: make screenshots"


async def test_the_documentation_shows_each_screenshot_and_no_other() -> None:
    pages = "".join(path.read_text() for path in ASSETS.parent.rglob("*.md"))
    assert sorted(path.name for path in ASSETS.glob("*.png")) == sorted(shot.file.name for shot in SHOTS)
    for shot in SHOTS:
        assert f"assets/{shot.file.name})" in pages, f"no page shows {shot.file.name}"
