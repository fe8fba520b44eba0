"""`spec.batch` and `spec.slo`: a batch on a volume, beside chats of a class with a bound, with the batch server killed in its middle."""

from collections.abc import Iterator

import pytest

from e2e.service import Load, Service
from e2e.system import System, eventually, read_result
from e2e.test_volume import Copier, volume, volume_claim

LINES = 120
CLASSES = {"defaultClass": "chat", "classes": [{"name": "chat", "ttftMilliseconds": 60_000}]}


@pytest.fixture
def claim(installed: System) -> Iterator[str]:
    """A claim that is bound to an empty folder of the node, which the batch server's group can write to."""
    copier = Copier(installed)
    copier.run("mkdir -p /volume/batches && chmod 0777 /volume/batches")
    access = {"accessModes": ["ReadWriteOnce"]}
    folder = volume(installed.models)
    folder["spec"] |= access
    bound = volume_claim(installed.models)
    bound["spec"] |= access
    installed.apply(folder, bound)
    yield "models"
    installed.cluster.kubectl("delete", "pvc/models", "-n", installed.models, "--wait=false")
    installed.cluster.kubectl("delete", "pv/fairlead-e2e-models", "--wait=false")
    copier.run("rm -rf /volume/batches")


def test_a_batch_survives_a_kill_of_its_server_and_delays_no_chat(installed: System, claim: str) -> None:
    service = Service(installed, "batched")
    with service.running(service.manifest(batch={"storageURI": f"pvc://{claim}/batches"}, slo=CLASSES), replicas=1):
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
