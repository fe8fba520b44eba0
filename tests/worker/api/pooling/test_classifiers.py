"""Models with a head behind HTTP: rerankers score pairs as one input, classifiers label texts; both as transformers computes them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.api.process import WorkerProcess
from tests.worker.model.encoders import make_encoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

QUERY, DOCUMENTS = "w1 w2 w3", ["w4 w5", "w6 " * 30, "w1 w2 w3", "w7"]

Logits = Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=[1, 3])
def labels(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(labels: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = {"id2label": {0: "bad", 1: "fair", 2: "good"}} if labels == 3 else {}
    return make_encoder(tmp_path_factory.mktemp("head"), "bert", labels, **named)


@pytest.fixture(scope="module")
def worker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    process = WorkerProcess(folder, tmp_path_factory.mktemp("run"), "--served-model-name", "head")
    yield process.wait_ready()
    assert process.stop() == 0


@pytest.fixture(scope="module")
def logits(folder: Path) -> Logits:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.inference_mode()
    def compute(*texts: str, **options: object) -> torch.Tensor:
        return model(**tokenizer(*texts, return_tensors="pt", **options)).logits[0].double()

    return compute


@pytest.mark.parametrize("labels", [1], indirect=True, scope="module")
def test_pairs_are_scored_by_the_head(worker: WorkerProcess, logits: Logits) -> None:
    want = [float(logits(QUERY, text).sigmoid()) for text in DOCUMENTS]
    results = worker.post("/rerank", query=QUERY, documents=DOCUMENTS).json()["results"]
    assert [each["index"] for each in results] == sorted(range(4), key=lambda index: -want[index])
    np.testing.assert_allclose([each["relevance_score"] for each in results], sorted(want, reverse=True), rtol=0, atol=1e-5)
    for first in (QUERY, [QUERY] * 4):
        answer = worker.post("/v1/score", text_1=first, text_2=DOCUMENTS).json()
        np.testing.assert_allclose([each["score"] for each in answer["data"]], want, rtol=0, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(3 + 3 + len(text.split()) for text in DOCUMENTS)
    raw = worker.post("/score", text_1=QUERY, text_2=DOCUMENTS[0], use_activation=False).json()["data"][0]["score"]
    assert raw == pytest.approx(float(logits(QUERY, DOCUMENTS[0])), abs=1e-5)


@pytest.mark.parametrize("labels", [1], indirect=True, scope="module")
@pytest.mark.parametrize(("first", "second"), [(10, 900), (900, 10), (700, 900), (600, 3)])
@pytest.mark.parametrize(("limit", "most"), [(-1, 512), (101, 101), (16, 16)])
def test_pairs_are_cut_as_by_transformers(worker: WorkerProcess, logits: Logits, first: int, second: int, limit: int, most: int) -> None:
    texts = [" ".join(f"w{(number * step) % 400}" for number in range(length)) for length, step in ((first, 3), (second, 7))]
    want = float(logits(*texts, truncation=True, max_length=most))
    answer = worker.post("/score", text_1=texts[0], text_2=texts[1], truncate_prompt_tokens=limit, use_activation=False).json()
    assert answer["usage"]["prompt_tokens"] == most and answer["data"][0]["score"] == pytest.approx(want, abs=1e-5)
    error = worker.post("/rerank", query=texts[0], documents=["w1", texts[1]]).json()["error"]
    assert error["param"] == "documents" and "documents[" in error["message"] and "512 tokens" in error["message"]


def test_texts_are_classified(worker: WorkerProcess, logits: Logits, labels: int) -> None:
    answer = worker.post("/classify", input=DOCUMENTS).json()
    assert answer["object"] == "list" and answer["id"].startswith("classify-") and answer["model"] == "head"
    for index, (text, each) in enumerate(zip(DOCUMENTS, answer["data"], strict=True)):
        want = logits(text).softmax(0) if labels > 1 else logits(text).sigmoid()
        name = ("bad", "fair", "good")[int(want.argmax())] if labels > 1 else "LABEL_0"
        assert (each["index"], each["label"], each["num_classes"]) == (index, name, labels)
        np.testing.assert_allclose(each["probs"], want, rtol=0, atol=1e-5)
    one = worker.post("/v1/classify", input=DOCUMENTS[0]).json()["data"]
    assert one == answer["data"][:1] == worker.post("/invocations", input=DOCUMENTS[0]).json()["data"]
    raw = worker.post("/classify", input=DOCUMENTS[0], use_activation=False).json()["data"][0]["probs"]
    np.testing.assert_allclose(raw, logits(DOCUMENTS[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("labels", [3], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/embeddings", {"input": "w1"}, "ForSequenceClassification head"),
        ("/v1/completions", {"prompt": "w1"}, "it scores texts (/score, /rerank) or classifies them (/classify)"),
        ("/rerank", {"query": "w1", "documents": ["w2"]}, "this model has 3 labels, and a score needs a model with one: use /classify"),
        ("/classify", {}, "input: is missing"),
        ("/classify", {"input": ["w1", [1]]}, "input: the list mixes"),
        ("/classify", {"input": [500]}, "500 is not in the model's vocabulary of 500"),
    ],
)
def test_what_is_wrong_is_named(worker: WorkerProcess, path: str, body: dict[str, object], says: str) -> None:
    answer = worker.post(path, **body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
