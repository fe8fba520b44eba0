"""Build hook of the wheel: compile the native library into it, so that installing needs no compiler.

The library uses no Python API and torch's own OpenMP: one wheel for each platform serves every Python version. Without a compiler, or on a
machine without kernels, the wheel is a pure one for any platform, and engines from it compute with torch alone.
"""

import importlib.util
import logging
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "worker/fairlead_worker/native/build.py"
FOLDER = "fairlead_worker/native"


class NativeLibraryHook(BuildHookInterface[Any]):
    """Add the library and its stamp to wheels. Editable installs use the one that `make install` compiles."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and choose the wheel's tag. `version`: `standard` or `editable`."""
        if version == "editable":
            return
        logging.basicConfig(format="%(message)s")  # the script says why it cannot compile
        native = _load(Path(self.root) / SCRIPT)
        if not native.build():
            self.app.display_warning(
                "this wheel has no native kernels: CPUs compute with torch alone, and slower. Install gcc and build again"
            )
            return
        for file in (native.LIBRARY, native.STAMP):
            build_data["force_include"][str(file)] = f"{FOLDER}/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load(script: Path) -> ModuleType:
    """Import the script alone: its package needs torch."""
    spec = importlib.util.spec_from_file_location("fairlead_native_build", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
