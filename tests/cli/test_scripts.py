"""`pip install fairlead` alone: every script starts, or names the extra that it needs."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fairlead.scripts

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
SCRIPTS: dict[str, str] = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]


def run_without(package: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the console script as pip makes it, on a machine without `package`."""
    module, _, function = SCRIPTS[script].partition(":")
    code = f"import sys; sys.modules[{package!r}] = None; from {module} import {function}; sys.exit({function}())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("package", "script", "arguments", "extra"),
    [
        ("kopf", "fairlead-operator", ["--help"], "operator"),
        ("httptools", "fairlead-router", ["--help"], "router"),
        ("uvloop", "fairlead-worker", ["--help"], "worker"),
        ("zmq", "fairlead-agent", ["--help"], "agent"),
        ("torch", "fairlead", ["make-model", "MODEL"], "local"),
        ("kubernetes", "kubectl-fairlead", ["status"], "operator"),
    ],
)
def test_a_script_without_its_packages_names_the_extra(tmp_path: Path, package: str, script: str, arguments: list[str], extra: str) -> None:
    done = run_without(package, script, *(word.replace("MODEL", str(tmp_path / "model")) for word in arguments))
    assert done.returncode == 1
    assert done.stderr == f"{script}: {package} is not installed: pip install 'fairlead[{extra}]'\n"


def test_the_fairlead_command_needs_no_extra() -> None:
    done = run_without("torch", "fairlead", "--help")
    assert done.returncode == 0 and "make-model" in done.stdout


def test_every_script_is_installed() -> None:
    for target in SCRIPTS.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_a_missing_module_of_our_own_is_an_error_and_suggests_no_extra() -> None:
    with pytest.raises(ModuleNotFoundError), fairlead.scripts.name_missing_extra("fairlead", "local"):
        importlib.import_module("fairlead.no_such_module")


def test_a_sigterm_before_the_program_is_imported_ends_it(tmp_path: Path) -> None:
    (tmp_path / "slow_program.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    code = "from fairlead.scripts import _run; _run('fairlead-slow', 'slow_program', 'worker')"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.terminate()
    assert process.wait(20) == 0
