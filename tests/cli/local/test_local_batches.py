"""`spec.batch` in local mode: what is refused. A batch runs in `test_local_mode`."""

from pathlib import Path

import pytest

from fairlead.errors import UserError
from fairlead.local.containers import paths_of
from fairlead.local.manifest import objects_of
from fairlead.local.workloads import workloads
from fairlead_operator.api import InferenceService


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
