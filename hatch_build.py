"""Build hook of the wheel: compile the native library into it, so that installing needs no compiler.

The library uses no Python API and torch's own OpenMP: one wheel for each platform serves every Python version. Its tag names the oldest
glibc that has all symbols that the library needs (PEP 600), because package indexes refuse `linux_x86_64`. Without a compiler, or on a
machine without kernels, the wheel is a pure one for any platform, and engines from it compute with torch alone.
"""

import importlib.util
import logging
import re
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from elftools.elf.elffile import ELFFile
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "worker/fairlead_worker/native/build.py"
FOLDER = "fairlead_worker/native"
GLIBC = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-.*")
"""Libraries that each glibc has. The library may need no others."""
OLDEST = 5
"""Minor version of the oldest glibc that has a tag, 2.5 of manylinux1."""


class NativeLibraryHook(BuildHookInterface[Any]):
    """Add the library and its stamp to wheels. Editable installs use the one that `make install` compiles."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and choose the wheel's tag. `version`: `standard` or `editable`."""
        if version == "editable":
            return
        logging.basicConfig(format="%(message)s", level=logging.INFO)  # the script shows its progress, and why it cannot compile
        native = _load(Path(self.root) / SCRIPT)
        if not native.build():
            self.app.display_warning(
                "this wheel has no native kernels: CPUs compute with torch alone, and slower. Install gcc and build again"
            )
            return
        for file in (native.LIBRARY, native.STAMP):
            build_data["force_include"][str(file)] = f"{FOLDER}/{file.name}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if platform.startswith("linux_"):
            platform = self._portable(native.LIBRARY, platform)
        build_data["tag"] = f"py3-none-{platform}"

    def _portable(self, library: Path, platform: str) -> str:
        """Return `manylinux_2_MINOR_MACHINE`, or `platform`, with a warning, if the library needs more than a glibc."""
        try:
            return platform.replace("linux", f"manylinux_2_{needed_glibc(library)}", 1)
        except ValueError as error:
            self.app.display_warning(f"package indexes refuse this wheel, tagged {platform}: {error}")
            return platform


def needed_glibc(library: Path) -> int:
    """Return the minor version of the oldest glibc 2 that has all symbols that a library needs.

    Raises ValueError if it needs other libraries.
    """
    with library.open("rb") as file:
        elf = ELFFile(file)
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        section = elf.get_section_by_name(".gnu.version_r")
        versions = {version.name for _, found in section.iter_versions() for version in found} if section else set()
    if others := sorted(name for name in needed if not GLIBC.fullmatch(name)):
        raise ValueError(f"{library.name} needs {', '.join(others)}, which is no part of glibc")
    minors = [re.fullmatch(r"GLIBC_2\.(\d+)(\.\d+)?", version) for version in versions]
    if not all(minors):
        raise ValueError(f"{library.name} needs {', '.join(sorted(versions))}, and not all of them are versions of glibc 2")
    return max([OLDEST, *(int(minor[1]) for minor in minors if minor)])


def _load(script: Path) -> ModuleType:
    """Import the script alone: its package needs torch."""
    spec = importlib.util.spec_from_file_location("fairlead_native_build", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
