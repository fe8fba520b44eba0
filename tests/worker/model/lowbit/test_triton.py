"""Triton's kernels compute what plain torch does, in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
from bench.common.report import ROOT

pytest.importorskip("triton", reason="torch's wheels have it on Linux")


def test_kernels_compute_what_torch_does() -> None:
    program = [sys.executable, "-m", "tests.worker.model.lowbit.interpreted"]
    done = subprocess.run(program, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
