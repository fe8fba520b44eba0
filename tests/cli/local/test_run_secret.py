"""The user who started a run with API keys reads its router's admin paths without a key of the service."""

import asyncio
from pathlib import Path

from tests.router.conftest import fleet  # noqa: F401
from tests.router.harness import Fleet
from tests.router.tenancy.test_access import guarded

from fairlead.local.rundir import RunRecord
from fairlead.local.up import has_waiting_requests
from fairlead.serve.fleet import make_record
from fairlead.tools.status import KeyRefused, read_workers


async def test_a_run_with_keys_is_read_with_its_own_secret(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
    secret = tmp_path / "batch-secret"
    secret.write_text("a secret that only the user's directory has")
    router, worker = await guarded(fleet, tmp_path, batch_secret_file=str(secret), hold_timeout=30)
    url, record = str(router.client.base_url).rstrip("/"), RunRecord(1, "fairlead up", {}, secret_file=str(secret))
    page = await asyncio.to_thread(read_workers, url, record.credential)
    assert [one["address"] for one in page["workers"]] == [worker.address]
    try:
        await asyncio.to_thread(read_workers, url, RunRecord(1, "fairlead serve", {}).credential)
        raise AssertionError("without the secret it must be refused")
    except KeyRefused:
        pass
    assert not await has_waiting_requests(url, record.credential)


def test_the_first_key_of_a_served_worker_is_used(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of this machine\n\nfirst\nsecond\n")
    record = make_record("fairlead serve ./m", "m", 8000, str(keys))
    assert record.credential == {"authorization": "Bearer first"} and "Bearer" in record.calls["serve"]
    keys.unlink()
    assert record.credential == {} == make_record("fairlead serve ./m", "m", 8000, "").credential
