"""`fairlead up` with `spec.batch`: the batch server is one more process, with its files below --model-root."""

from contextlib import closing
from pathlib import Path

import openai
import pytest
from tests.cli.local.test_local_mode import start
from tests.cli.processes import wait_until_gone
from tests.router.batch.deployment import create, line, results, wait

from fairlead.errors import UserError
from fairlead.local.containers import paths_of
from fairlead.local.manifest import objects_of
from fairlead.local.workloads import workloads
from fairlead.random_model import make_model
from fairlead_operator.api import InferenceService

MORE = "  batch: {storageURI: 'pvc://batches'}\n"


def test_a_batch_runs_locally(short_path: Path) -> None:
    make_model(short_path / "models" / "small", vocab=1024)
    (short_path / "batches").mkdir()
    up = start(short_path, 1, more=MORE)
    try:
        with closing(openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60)) as client:
            batch = wait(client, create(client, [line(f"r{n}", model="small") for n in range(5)]))
            assert batch.status == "completed" and results(client, batch.output_file_id).keys() == {f"r{n}" for n in range(5)}
            assert (short_path / "batches" / "files" / str(batch.output_file_id)).exists()
    finally:
        up.process.terminate()
        up.process.wait(60)
    wait_until_gone(up.mark)


def test_a_claim_without_a_folder_is_refused_with_the_fix(tmp_path: Path) -> None:
    spec = {"model": {"uri": "file:///m"}, "batch": {"storageURI": "pvc://batches"}}
    service = InferenceService.parse({"metadata": {"name": "small"}, "spec": spec})
    made = workloads(objects_of(service, redis_url="unix:///r"), service="small", router_port=8080, batch_port=8090)
    (batch,) = (one for one in made if one.component == "batch")
    assert batch.port == 8090 and batch.replicas == 1
    with pytest.raises(UserError, match="--model-root DIR, with the claim's files in DIR/batches"):
        paths_of(batch.template, None)("/var/lib/fairlead")
    with pytest.raises(UserError, match="create it"):
        paths_of(batch.template, tmp_path)("/var/lib/fairlead")
