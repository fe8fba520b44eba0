"""A headless Chromium as Debian builds it, for the tests: `make chromium`. The system is not changed.

`chromium-headless-shell` is the smallest of Debian's builds (59 MB; `chromium-shell` 65, `chromium` 77). It draws in software, and so the
drivers of graphics cards are left out. It runs with the system's loader and C library, which must be those of Debian 12 or newer: its
processes start each other through /proc/self/exe, which would be the loader of another release.
"""

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

from e2e.progress import step
from tests.servers import debian

SUITE = "bookworm"
PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core")
LEFT_OUT = ("libc6", "libgl1-mesa-dri", "libicu72", "libllvm15", "libxml2", "libz3-4", "xkb-data")
"""The C library is the system's. The others are for graphics cards, which are not used (50 MB)."""
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
<alias><family>serif</family><prefer><family>DejaVu Serif</family></prefer></alias>
</fontconfig>
"""
"""One font family, so that a page has the same widths on every machine."""
LAUNCHER = f"""#!/bin/sh
root="$(dirname "$(readlink -f "$0")")/root"
libraries="$root/{debian.libraries()}"
export LD_LIBRARY_PATH="$libraries:$root/{debian.libraries()[4:]}:$libraries/pulseaudio"
export FONTCONFIG_FILE="$root/fonts.conf"
exec "$root/usr/lib/chromium/chromium-headless-shell" "$@"
"""


def launcher() -> Path:
    """Return the script that runs Chromium, whether or not it exists. Another definition in this module makes another folder."""
    content = repr((SUITE, PACKAGES, LEFT_OUT, FONTS, LAUNCHER, platform.machine()))
    return debian.cache() / "chromium" / hashlib.sha256(content.encode()).hexdigest()[:10] / "chromium"


def _write(path: Path) -> None:
    (path.parent / "root" / "fonts.conf").write_text(FONTS)
    path.write_text(LAUNCHER)


def main() -> None:
    if launcher().exists():
        return
    mirror = debian.debian_mirror()
    if not mirror:
        print("no apt with a Debian mirror here: tests in a browser are skipped", file=sys.stderr)
        return
    try:
        with step("install Chromium for the tests (110 MB)"):
            debian.unpack_with(launcher().parent, "chromium", SUITE, PACKAGES, _write, mirror, LEFT_OUT)
        print(f"Chromium: {launcher()}")
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        print(f"Chromium could not be fetched, tests in a browser are skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
