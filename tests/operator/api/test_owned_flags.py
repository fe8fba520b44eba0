"""`spec.engine.args` without the flags that other objects of the operator rely on."""

import pytest
from tests.operator.support.manifests import service

from fairlead_operator.api import InvalidManifest
from fairlead_operator.api.owned_flags import OWNED_FLAGS
from fairlead_operator.children.model_source import model_source
from fairlead_operator.children.worker import arguments
from fairlead_worker.config import WorkerConfig
from fairlead_worker.config.options import flag_name, topic_of

REPLACED = {
    "--model=hf://a/b": "spec.model.uri",
    "--api-key-file=/keys": "spec.access.keysSecretRef",
    "--nnodes": "spec.engine.nodes",
    "--port": "remove it",
}


@pytest.mark.parametrize(("arg", "instead"), REPLACED.items())
def test_a_flag_of_the_operator_is_refused_with_its_field(arg: str, instead: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        service(engine={"args": ["--threads=2", arg, "value"]})
    assert str(refused.value).startswith(f"spec.engine.args must not have {arg.partition('=')[0]}: ") and instead in str(refused.value)


def test_every_refused_flag_exists_and_other_flags_still_win() -> None:
    flags = {flag_name(name) for name, field in WorkerConfig.model_fields.items() if topic_of(field)}
    assert {f"--{flag}" for flag in OWNED_FLAGS} <= flags
    allowed = ["--scheduling-policy=fcfs", "--threads", "3", "--model-of-another-release=1"]
    one = service(engine={"args": allowed})
    assert arguments(one, model_source(one.spec))[-4:] == allowed
