"""Every test runs at one CPU level: what the machine has, or what `FAIRLEAD_CPU_ISA` forces."""

import pytest

from fairlead_worker.isa import CpuLevelError, cpu_level


def pytest_report_header() -> str:
    try:
        return f"CPU level: {cpu_level()}"
    except CpuLevelError as error:
        pytest.exit(str(error), returncode=4)
