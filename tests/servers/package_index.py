"""A package index on loopback: a folder of wheels as a simple index (PEP 503), and an address where none answers."""

import hashlib
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any


def environment(port: int) -> dict[str, str]:
    """Return the variables with which pip asks the index at `port` on loopback, and no other."""
    return {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


NO_INDEX = environment(9)
"""No process listens on port 9."""


class PackageIndex:
    """Serves the wheels that `add` makes. `downloads` counts those of each wheel; while `gate` is clear they wait."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self.environment = environment(port)
        self.downloads: Counter[str] = Counter()
        self.gate, self.asked = Event(), Event()
        self.gate.set()

    def add(self, name: str, version: str, files: Mapping[str, bytes]) -> str:
        """Make a wheel of `files` by path; return its SHA-256."""
        module = name.replace("-", "_")
        wheel = f"{module}-{version}-py3-none-any.whl"
        page = self._folder / "simple" / name
        page.mkdir(parents=True)
        information = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        with zipfile.ZipFile(page / wheel, "w") as archive:
            for path, content in files.items():
                archive.writestr(path, content)
            for path, text in information.items():
                archive.writestr(f"{module}-{version}.dist-info/{path}", text)
        (page / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')
        return hashlib.sha256((page / wheel).read_bytes()).hexdigest()


@contextmanager
def package_index(folder: Path) -> Iterator[PackageIndex]:
    """Run a package index whose files are in `folder` until the block ends."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(".whl"):
                index.downloads[self.path.rpartition("/")[2]] += 1
                index.asked.set()
                index.gate.wait()
            super().do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        index = PackageIndex(folder, server.server_port)
        Thread(target=server.serve_forever, daemon=True).start()
        yield index
        index.gate.set()
        server.shutdown()
