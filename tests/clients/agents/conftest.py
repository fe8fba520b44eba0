"""A worker with a trained model for the sessions of agents' programs."""

from collections.abc import Iterator

import pytest
from tests.clients.agents.program import MODELS
from tests.clients.deployment import TEMPLATE
from tests.real_models import GEMMA3, real_folder
from tests.worker.api.process import WorkerProcess

MARKERS = {"<|im_start|>": "<start_of_turn>", "<|im_end|>": "<end_of_turn>"}


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Serve Gemma 3 270M, whose 32,768 tokens hold the long prompts of coding agents. It is a base model without a template."""
    folder, template = tmp_path_factory.mktemp("agents"), "{{ bos_token }}" + TEMPLATE
    for marker, own in MARKERS.items():
        template = template.replace(marker, own)
    (folder / "template.jinja").write_text(template)
    flags = (
        "--served-model-name",
        ",".join(MODELS),
        "--chat-template",
        str(folder / "template.jinja"),
        "--kv-pages",
        "2600",
        "--threads",
        "2",
    )
    process = WorkerProcess(real_folder(GEMMA3), folder / "worker", *flags)
    yield process.wait_ready()
    assert process.stop() == 0
