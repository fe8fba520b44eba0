"""A client that openapi-python-client generates from the document: it calls the worker, and streams a chat.

The generated functions return whole answers, because the generator knows no streams. The client's request builder and the model of an event
are enough for one: `STREAM` is what a user writes.
"""

import json
import subprocess
from pathlib import Path

import pytest
from tests.api.fleet import Pair
from tests.own_environment import OwnEnvironment

ENVIRONMENT = OwnEnvironment("openapi-client", Path(__file__).parent / "openapi_client" / "requirements.txt")
CALL = """
import json, sys
from fairlead_client import Client
from fairlead_client.api.open_ai import create_chat_completion, list_models
from fairlead_client.api.anthropic import create_message
from fairlead_client.models import ChatMessage, ChatRequest, InputMessage, InputMessageRole, MessagesBody

client = Client(base_url=sys.argv[1], timeout=60)
model = list_models.sync(client=client).data[0].id
messages = [ChatMessage(role="user", content="hi")]
chat = create_chat_completion.sync(client=client, body=ChatRequest(messages=messages, max_tokens=6, temperature=0))
refused = create_chat_completion.sync(client=client, body=ChatRequest(messages=messages, temperature=9))
body = MessagesBody(messages=[InputMessage(role=InputMessageRole.USER, content="hi")], max_tokens=6, temperature=0)
message = create_message.sync(client=client, body=body)
"""
STREAM = """
from fairlead_client.models import ChatCompletionChunk

request = create_chat_completion._get_kwargs(body=ChatRequest(messages=messages, max_tokens=6, temperature=0, stream=True))
with client.get_httpx_client().stream(**request) as response:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
chunks = [ChatCompletionChunk.from_dict(json.loads(line)) for line in lines[:-1]]
streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
"""
PRINT = """
print(json.dumps({
    "model": model, "whole": chat.choices[0].message.content, "streamed": streamed, "end": lines[-1], "chunks": len(chunks),
    "param": refused.error.param, "message": message.content[0].text, "tokens": message.usage.output_tokens,
}))
"""


@pytest.mark.parametrize("side", [0, 1], ids=["worker", "router"])
def test_a_generated_client_calls_and_streams(pair: Pair, tmp_path: Path, side: int) -> None:
    if problem := ENVIRONMENT.install():
        pytest.fail(f"the generator cannot be installed: {problem}")
    document = pair.worker.client.get("/openapi.json").json()
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    command = ["openapi-python-client", "generate", "--path", "openapi.json", "--meta", "none", "--output-path", "fairlead_client"]
    generated = subprocess.run(
        [ENVIRONMENT.folder / "bin" / command[0], *command[1:]], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert generated.returncode == 0, generated.stdout
    omitted = [line for line in generated.stdout.splitlines() if line.startswith("WARNING")]
    assert omitted == ["WARNING parsing GET /internal/hot-prefixes/{tokens} within admin."], "the answer of this one is no JSON"
    functions = {path.stem for path in (tmp_path / "fairlead_client" / "api").glob("*/*.py")} - {"__init__"}
    assert functions == {each["operationId"] for said in document["paths"].values() for each in said.values()}

    ran = subprocess.run([ENVIRONMENT.python, "-c", CALL + STREAM + PRINT, pair.urls[side]], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["whole"] and said["streamed"] == said["whole"] and said["chunks"] > 2 and said["end"] == "[DONE]"
    assert said["param"] == "temperature" and said["message"] and said["tokens"] == 6
