"""LangChain, LlamaIndex, LiteLLM, and the major version of openai that they pin: suites in their own environment (`make clients`).

The environment is separate because LiteLLM pins an older major version of openai than the project's tests use, and brings a hundred
packages.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.clients.endpoints import Endpoints
from tests.own_environment import OwnEnvironment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = OwnEnvironment("clients", HERE / "frameworks" / "requirements.txt")
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
"""The suites contact nothing but the endpoint."""
SUITES = {
    "frameworks": [f"frameworks/test_{name}.py" for name in ("langchain", "llama_index", "litellm")],
    "openai-2": [path.name for path in sorted(HERE.glob("test_openai_*.py"))],
}


@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite: str, deployment: Endpoints) -> None:
    problem = ENVIRONMENT.install()
    assert not problem, f"the clients' environment cannot be made: {problem}"
    command = [
        ENVIRONMENT.python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        *(HERE / path for path in SUITES[suite]),
    ]
    given = {"FAIRLEAD_CLIENTS": json.dumps(asdict(deployment)), "PYTHONPATH": str(ROOT)}
    if suite == "openai-2":
        given["FAIRLEAD_CLIENTS_THROUGH"] = "router"  # the tests of the newer version also run against the worker
    environment = os.environ | OFFLINE | given
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:]
    summary = next(line for line in reversed(done.stdout.splitlines()) if " passed" in line)  # warnings may follow it
    assert "skipped" not in summary, summary
    print(f"{suite}: {summary}")


if __name__ == "__main__":
    problem = ENVIRONMENT.install()
    sys.exit(f"the clients' environment cannot be made: {problem}" if problem else None)
