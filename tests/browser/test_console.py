"""The router's web console in a browser: with 500 pods, in a narrow window, with a login, and while it updates."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser
from tests.browser.conftest import Visit
from tests.router.harness import Fleet
from tests.router.tenancy.test_access import ANNA, guarded

from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.workers import WorkerTable

pytestmark = pytest.mark.asyncio(loop_scope="session")
NARROW = 360


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(browser: Browser, tmp_path: Path) -> AsyncIterator[Fleet]:
    """It needs the browser, so that nothing starts where there is none."""
    async with AsyncExitStack() as stack:
        yield Fleet(stack, tmp_path)


def table_of(count: int) -> WorkerTable:
    """Return a table of pods. A higher number is a longer queue."""
    table = WorkerTable()
    table.set_addresses({f"10.0.{number // 250}.{number % 250}:8000" for number in range(count)})
    for number, worker in enumerate(sorted(table, key=lambda worker: worker.address)):
        worker.pod = f"pod-{number:03}"
        worker.load = WorkerLoad(running=4, waiting=number, prefill_rate=4000.0, pages_total=100, pages_free=60)
    return table


async def test_500_pods_are_sorted_filtered_and_updated(fleet: Fleet, new_visitor: Visit) -> None:
    router = await fleet.router(await fleet.worker(), console=True)
    router.server.router.table = table = table_of(500)
    visitor = await new_visitor(f"http://127.0.0.1:{router.port}")
    page = await visitor.open("/ui")
    rows = page.locator("#fleet tbody tr")
    await rows.nth(499).wait_for()
    await page.get_by_role("button", name="Waiting").click()
    await page.locator("#fleet tbody tr:first-child", has_text="pod-499").wait_for()
    assert await page.get_by_role("columnheader", name="Waiting").get_attribute("aria-sort") == "descending"
    await page.get_by_role("searchbox").fill("POD-12")
    await page.get_by_text("10 of 500", exact=True).wait_for()
    assert await rows.count() == 10
    next(worker for worker in table if worker.pod == "pod-120").load = WorkerLoad(running=4, waiting=12345)
    await page.locator("#fleet tbody tr:first-child", has_text="12,345").wait_for()
    await visitor.tab_through()


async def test_every_page_fits_a_narrow_window(fleet: Fleet, new_visitor: Visit) -> None:
    router = await fleet.router(await fleet.worker(pod="a-pod-with-a-long-name-" * 6), await fleet.worker(), console=True)
    await router.complete("hello " * 50, stream=True)
    visitor = await new_visitor(f"http://127.0.0.1:{router.port}")
    for path in PAGES:
        page = await visitor.open(path, NARROW)
        for opened in await page.locator("details").all():
            await opened.evaluate("each => { each.open = true }")
        assert await visitor.find_overflow() == [], path


async def test_a_key_opens_the_console_and_log_out_closes_it(fleet: Fleet, tmp_path: Path, new_visitor: Visit) -> None:
    router, _ = await guarded(fleet, tmp_path, console=True)
    visitor = await new_visitor(f"http://127.0.0.1:{router.port}")
    page = await visitor.open("/ui")
    for key, shown in (("fl-wrong", page.get_by_role("alert")), (ANNA, page.get_by_role("heading", name="Fleet"))):
        await page.get_by_label("API key").fill(key)
        await page.get_by_role("button", name="Log in").click()
        await shown.wait_for()
    assert ANNA not in page.url
    await page.locator("#fleet tbody tr", has_text="pod-0").wait_for()
    await page.get_by_role("button", name="Log out").click()
    await page.get_by_role("heading", name="Log in").wait_for()
    assert all("401" in problem for problem in visitor.problems), visitor.problems
    visitor.problems.clear()  # a page without a login is a 401, which the browser reports


async def test_without_the_script_the_first_state_is_there(fleet: Fleet, browser: Browser) -> None:
    router = await fleet.router(await fleet.worker(), console=True)
    context = await browser.new_context(java_script_enabled=False)
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{router.port}/ui")
    assert await page.locator("#fleet tbody tr", has_text="pod-0").is_visible()
    assert not await page.get_by_role("searchbox").is_visible()
    await context.close()


PAGES = ("/ui", "/ui/requests", "/ui/prefixes", "/ui/pods/pod-1/schedule")
