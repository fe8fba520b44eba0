"""A short run of the fuzzer: `python -m tests.index.fuzz --operations 100000` is the full one."""

import pytest
from tests.index.fuzz import Fuzz
from tests.servers.redis_server import binary


@pytest.mark.parametrize("version", ("6.2", "7.0"))  # without and with `%R~` key permissions
async def test_the_index_is_exact_after_every_fault(version: str, caplog: pytest.LogCaptureFixture) -> None:
    if binary(version) is None:
        pytest.skip(f"no redis-server {version} on this machine")
    caplog.set_level("ERROR")
    fuzz = Fuzz(seed=4, version=version, pods=24)
    await fuzz.run(1200)
    assert fuzz.operations == 1200 and len(fuzz.faults) >= 3
