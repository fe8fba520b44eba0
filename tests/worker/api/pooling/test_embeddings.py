"""`/v1/embeddings`, `/score` and `/rerank` of a real worker: formats, fields, limits and errors."""

import base64
import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.api.process import WorkerProcess
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM

from fairlead.random_model.build import make_model
from fairlead_worker.api.pooling import similarity

TEXTS = ["a ring that guides a rope", "where it should run", "where it should run, again"]


def embed(worker: WorkerProcess, **body: Any) -> dict[str, Any]:
    answer = worker.post("/v1/embeddings", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(answer: dict[str, Any]) -> np.ndarray:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


def tokens(worker: WorkerProcess, text: str) -> list[int]:
    return worker.post("/tokenize", prompt=text).json()["tokens"]


def test_they_are_the_models_own_last_states(shared: WorkerProcess, model: Path) -> None:
    answer = embed(shared, input=TEXTS, model="tiny", user="u")
    assert answer["object"] == "list" and answer["model"] == "tiny"
    ids = [tokens(shared, text) for text in TEXTS]
    count = sum(map(len, ids))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [reference.base_model(torch.tensor([each])).last_hidden_state[0, -1] for each in ids]
    want = normalize(torch.stack(states), dim=1).numpy()
    assert (vectors(answer) * want).sum(1).min() > 0.995  # served in bfloat16


def test_the_same_text_in_every_form_and_batch_is_the_same_vector(shared: WorkerProcess) -> None:
    one, ids = vectors(embed(shared, input=TEXTS[0])), [tokens(shared, text) for text in TEXTS]
    for given in (ids[0], [TEXTS[0]], [ids[0]], TEXTS, ids):
        np.testing.assert_array_equal(vectors(embed(shared, input=given))[0], one[0])
    coded = embed(shared, input=TEXTS[0], encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), one[0])
    assert abs(np.linalg.norm(one[0]) - 1) < 1e-6


def test_a_text_is_truncated_to_the_wanted_side(shared: WorkerProcess) -> None:
    ids, size = tokens(shared, TEXTS[1]), 2
    for side, kept in ((None, ids[-size:]), ("left", ids[-size:]), ("right", ids[:size])):
        got = embed(shared, input=TEXTS[1], truncate_prompt_tokens=size, truncation_side=side)
        assert got["usage"]["prompt_tokens"] == size
        np.testing.assert_array_equal(vectors(got), vectors(embed(shared, input=kept)))
    assert embed(shared, input="a b " * 5000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 4096


def test_a_chat_is_embedded_as_its_prompt(shared: WorkerProcess) -> None:
    chat = [{"role": "user", "content": TEXTS[0]}]
    for generation in (False, True):
        ids = shared.post("/tokenize", messages=chat, add_generation_prompt=generation).json()["tokens"]
        got = embed(shared, messages=chat, add_generation_prompt=generation)
        np.testing.assert_array_equal(vectors(got), vectors(embed(shared, input=ids)))


def test_beside_streams_and_in_hundreds(shared: WorkerProcess) -> None:
    many = [f"text {number} " * 30 for number in range(300)]
    with shared.stream("/v1/completions", prompt="go on", max_tokens=50, temperature=0, ignore_eos=True) as (_, events):
        first = next(events)
        assert isinstance(first, dict)
        assert len(embed(shared, input=many)["data"]) == 300
        assert list(events)[-1] == "[DONE]"
    before = shared.metric("fairlead_request_success_total")
    answer = shared.post("/v1/embeddings", input=many[-1])
    assert int(answer.headers["x-fairlead-cached-tokens"]) > 0, "the last token needs no more than the KV before it"
    assert answer.headers["x-fairlead-usage"] == f"{len(tokens(shared, many[-1]))} 0"
    assert shared.metric("fairlead_request_success_total") >= before


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "is missing"),
        ({"input": []}, "input", "is missing"),
        ({"input": ""}, "input", "input: has no tokens"),
        ({"input": ["a", ""]}, "input", "input[1]: has no tokens"),
        ({"input": ["a", [1]]}, "input", "mixes"),
        ({"input": [5, 4000000]}, "input", "4000000 is not in the model's vocabulary of 1024"),
        ({"input": [[5], [1024]]}, "input", "input[1]: token id 1024"),
        ({"input": ["a"] * 2049}, "input", "2049 texts are more than 2048"),
        ({"input": ["a", "a " * 5000]}, "input", "length is 4096 tokens. However, input[1] is too long: it has 5001 tokens"),
        ({"input": "a", "dimensions": 8}, "dimensions", "--matryoshka"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'int8'; give 'base64' or 'float'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "neither -1 nor from 1"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "give either input or messages"),
        ({"input": "a", "normalize": False}, "normalize", "unit length"),
        ({"input": "a", "use_activation": False}, "use_activation", "unit length"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": "a", "endianness": "big"}, "endianness", "little"),
        ({"input": {"text": "a"}}, "input", "expected"),
    ],
)
def test_what_is_wrong_is_named(shared: WorkerProcess, body: dict[str, Any], param: str, says: str) -> None:
    answer = shared.post("/v1/embeddings", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(param) and says in error["message"], error


def test_scores_are_cosines(shared: WorkerProcess) -> None:
    a, b, c = vectors(embed(shared, input=TEXTS))
    for path in ("/score", "/v1/score"):
        answer = shared.post(path, text_1=TEXTS[0], text_2=TEXTS[1:]).json()
        assert [each["score"] for each in answer["data"]] == pytest.approx([float(a @ b), float(a @ c)], abs=1e-6)
    pairs = shared.post("/score", text_1=TEXTS[:2], text_2=TEXTS[1:]).json()["data"]
    assert [each["score"] for each in pairs] == pytest.approx([float(a @ b), float(b @ c)], abs=1e-6)
    assert shared.post("/score", text_1=TEXTS, text_2=TEXTS[:2]).json()["error"]["param"] == "text_1"
    assert shared.post("/score", text_1="a").json()["error"]["param"] == "text_2"
    for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        assert shared.post("/score", **{first: TEXTS[:2], second: TEXTS[1:]}).json()["data"] == pairs
        assert shared.post("/score", **{first: TEXTS, second: TEXTS[:2]}).json()["error"]["param"] == first
    assert shared.post("/score", text_1="a", queries="a", text_2="b").json()["error"]["param"] == "queries"


def test_many_scores_take_little_of_the_interpreters_lock() -> None:
    """The maximum number of texts with a large model's vector size: the event loop waits for the interpreter's lock."""
    values = np.random.default_rng(0).standard_normal((2047, 1024)).astype(np.float32)
    rows = [array("f", row.tobytes()) for row in values]
    took = []
    for _ in range(5):
        began = time.thread_time()
        scores = similarity.compute_cosines(rows[:1], rows)
        took.append(time.thread_time() - began)
    np.testing.assert_allclose(scores, values.astype(np.float64) @ values[0].astype(np.float64), rtol=1e-9, atol=1e-9)
    assert min(took) < 0.03


def test_rerankings_begin_with_the_nearest(shared: WorkerProcess) -> None:
    query, *others = vectors(embed(shared, input=[TEXTS[2], *TEXTS]))
    order = sorted(range(3), key=lambda index: -float(query @ others[index]))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = shared.post(path, query=TEXTS[2], documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]).json()
        assert [each["index"] for each in answer["results"]] == order
        assert answer["results"][0]["index"] == 2 and answer["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
        assert answer["results"][0]["document"] == {"text": TEXTS[2]}
    assert len(shared.post("/rerank", query="a", documents=TEXTS, top_n=0).json()["results"]) == len(TEXTS)
    short = shared.post("/rerank", query="a", documents=TEXTS, top_n=1, return_documents=False).json()["results"]
    assert len(short) == 1 and "document" not in short[0]
    assert shared.post("/rerank", query="a", documents=[]).json()["error"]["param"] == "documents"


def test_a_model_made_for_embeddings(start: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    """A model without a head, with mean pooling from its files, and with shorter embeddings allowed."""
    folder = make_model(tmp_path / "bare", "qwen3", vocab=1024, layers=1)
    AutoModelForCausalLM.from_pretrained(folder).base_model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 32], "architectures": ["Qwen3Model"]}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}))
    worker = start("--model", f"file://{folder}", "--dtype", "float32").wait_ready()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model.eval()
    with torch.no_grad():
        states = reference(torch.tensor([tokens(worker, TEXTS[0])])).last_hidden_state[0].mean(0)
    (whole,) = vectors(embed(worker, input=TEXTS[0]))
    np.testing.assert_allclose(whole, normalize(states, dim=0).numpy(), atol=1e-5)
    (truncate_vector,) = vectors(embed(worker, input=TEXTS[0], dimensions=16))
    np.testing.assert_allclose(truncate_vector, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    assert "must be one of 16, 32" in worker.post("/v1/embeddings", input="a", dimensions=8).json()["error"]["message"]
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})):
        refused = worker.post(path, **body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "generation_not_served", refused.text
