"""The worker runs from a tree that is not installed: GPU machines without a package index get one."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_tree_that_is_not_installed_has_a_version_too() -> None:
    script = f"import sys; sys.path = [part for part in sys.path if 'site-packages' not in part] + [{str(ROOT / 'worker')!r}]\n"
    script += "from fairlead_worker.platform.version import release; print(release())"
    said = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "0+tree\n"
