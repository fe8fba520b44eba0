"""Screenshots of the documentation: `make screenshots` writes docs/assets/*.png.

Fonts, clock, size and browser are fixed, but pixels still differ between versions of Chromium. So tests compare sizes, not pixels.
"""

import asyncio
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.async_api import Browser
from tests.api.fleet import Pair
from tests.api.fuzz import ROUTER_FLAGS
from tests.browser.visitor import start_browser, visit

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
LARGEST = 200_000
"""Bytes of one file: the pages are drawings of text, which compress well."""


@dataclass(frozen=True)
class Shot:
    """One picture: `path` of the router in a window of `width` by `height` pixels."""

    name: str
    path: str
    width: int
    height: int

    @property
    def file(self) -> Path:
        return ASSETS / f"{self.name}.png"


SHOTS = (Shot("api-reference", "/docs", 960, 600), Shot("console-fleet", "/ui", 960, 420))


async def take(browser: Browser, origin: str, shot: Shot) -> bytes:
    """Return the picture as a PNG. Raises AssertionError if the page has a problem."""
    async with visit(browser, origin) as visitor:
        await visitor.freeze()
        await visitor.open(shot.path, shot.width, shot.height)
        await visitor.hide("#replica")  # the name of this machine
        png = await visitor.screenshot()
        assert not visitor.problems, visitor.problems
        return png


def png_size(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG. Raises ValueError for anything else."""
    if not png.startswith(b"\x89PNG\r\n\x1a\n") or png[12:16] != b"IHDR":
        raise ValueError("not a PNG")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


async def _write_all(origin: str) -> None:
    ASSETS.mkdir(exist_ok=True)
    async with start_browser() as browser:
        for shot in SHOTS:
            shot.file.write_bytes(await take(browser, origin, shot))
            print(f"{shot.file}: {shot.file.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Pair(Path(folder), router_flags=ROUTER_FLAGS) as pair:
        asyncio.run(_write_all(pair.urls[1]))


if __name__ == "__main__":
    main()
