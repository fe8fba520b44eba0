"""The client snippets of docs/guides/clients.md and the README work: each is run unchanged against the router."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clients.endpoints import MODEL, Endpoints
from tests.clients.test_frameworks import ENVIRONMENT, OFFLINE

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"
README = Path(__file__).parents[2] / "README.md"
SERVICE, HOST = "qwen", "http://qwen.default.svc"
"""From the README's manifest: the service, and its address in a cluster."""
SNIPPETS = re.findall(r"^## (\w+)\n```(\w+)\n(.*?)^```", PAGE.read_text(), re.S | re.M)
OURS = ("openai", "anthropic")
"""Clients of the project's own environment; the others have their own."""


@pytest.mark.parametrize(("client", "language", "code"), SNIPPETS, ids=[snippet[0] for snippet in SNIPPETS])
def test_every_client_snippet_gets_an_answer(client: str, language: str, code: str, deployment: Endpoints) -> None:
    if language == "sh":
        command = ["sh", "-e", "-c", code]
    elif client in OURS:
        command = [sys.executable, "-c", code]
    else:
        assert not ENVIRONMENT.install()
        command = [str(ENVIRONMENT.python), "-c", code]
    environment = os.environ | OFFLINE | {"BASE_URL": deployment.router, "MODEL": MODEL}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip(), "nothing was answered"


def test_the_readmes_clients_get_an_answer(deployment: Endpoints) -> None:
    fenced = re.findall(r"^```(python|sh)\n(.*?)^```", README.read_text(), re.S | re.M)
    calls = [(language, code) for language, code in fenced if HOST in code]
    assert [language for language, _ in calls] == ["python", "sh"]
    for language, code in calls:
        here = code.replace(HOST, deployment.router).replace(f'"{SERVICE}"', f'"{MODEL}"')
        command = [sys.executable, "-c", here] if language == "python" else ["sh", "-e", "-c", here]
        said = ""
        for _ in range(2):  # one answer in 900 of a random model ends with its first token
            done = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=280)
            assert done.returncode == 0 and '"error"' not in done.stdout, done.stdout + done.stderr
            said += done.stdout.strip()
        assert said


def test_the_page_has_a_snippet_for_each_client() -> None:
    assert [snippet[0] for snippet in SNIPPETS] == ["curl", "openai", "anthropic", "LangChain", "LlamaIndex", "LiteLLM"]
