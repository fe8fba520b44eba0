"""`spec.batch` and `spec.slo`: a batch on a volume, beside chats of a class with a bound, with the batch server killed in its middle."""

from collections.abc import Iterator

import pytest

from e2e.service import Load, Service
from e2e.system import System, eventually, read_result
from e2e.test_volume import FOLDER, Copier
from e2e.volume import claim

LINES = 120
CLASSES = {"defaultClass": "chat", "classes": [{"name": "chat", "ttftMilliseconds": 60_000}]}


@pytest.fixture
def bound(installed: System) -> Iterator[str]:
    """A claim that is bound to an empty folder of the node, which the batch server's group can write to."""
    copier = Copier(installed)
    copier.run("mkdir -p /volume/batches && chmod 0777 /volume/batches")
    with claim(installed, "models", FOLDER, "ReadWriteOnce") as name:
        yield name
    copier.run("rm -rf /volume/batches")


@pytest.mark.long
def test_a_batch_survives_a_kill_of_its_server_and_delays_no_chat(installed: System, bound: str) -> None:
    service = Service(installed, "batched")
    with service.running(service.manifest(batch={"storageURI": f"pvc://{bound}/batches"}, slo=CLASSES), replicas=1):
        eventually(lambda: service.condition("BatchReady").get("status") == "True", 120, "BatchReady")
        with Load(service, concurrency=1, max_tokens=4) as load:
            batch = installed.client("batch.py", service.url, service.name, str(LINES))
            assert batch.stderr is not None
            assert "stored" in batch.stderr.readline()
            (pod,) = service.pods("batch")
            installed.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", installed.models, "--grace-period=0", "--force")
            result = read_result(batch)
        assert (result["status"], result["error_file"], result["codes"]) == ("completed", None, [200]), result
        assert sorted(result["ids"]) == sorted(f"line-{number}" for number in range(LINES)), "each line exactly once"
        load.assert_answered()
