"""all-MiniLM-L6-v2 behind HTTP gives sentence-transformers' vectors: the mean of transformers' states over the mask, of unit length."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.real_models import MINILM, real_model
from tests.worker.api.process import WorkerProcess
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.loader import load_model

TEXTS = [
    "How many people live in Berlin?",
    "Berlin has a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers.",
    "New York City is famous for the Metropolitan Museum of Art.",
    "Ein Satz mit Umlauten, emoji \N{SMILING FACE WITH OPEN MOUTH} and [SEP] inside.",
    "a " * 200,
    "extraordinarily comprehensive documentation " * 30,
    "",
]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    flags = ("--served-model-name", "minilm", "--max-prefill-tokens", "64")
    process = WorkerProcess(real_model(MINILM), tmp_path_factory.mktemp("minilm"), *flags)
    yield process.wait_ready()
    assert process.stop() == 0


@torch.inference_mode()
def reference(folder: Path, texts: list[str], most: int = 256) -> np.ndarray:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")
    states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    return normalize((states * mask).sum(1) / mask.sum(1)).numpy()


def test_vectors_are_those_of_sentence_transformers(worker: WorkerProcess) -> None:
    """Texts longer than a step's budget of 64 tokens among them."""
    want = reference(real_model(MINILM), TEXTS)
    for text, vector in zip(TEXTS, want, strict=True):
        (one,) = worker.post("/v1/embeddings", input=text).json()["data"]
        np.testing.assert_allclose(one["embedding"], vector, rtol=0, atol=1e-5)
    answer = worker.post("/v1/embeddings", input=TEXTS).json()
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], want, rtol=0, atol=1e-5)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    load = worker.load()
    assert load["waiting"] == load["running"] == 0 and load["pages_free"] == load["pages_total"]


def test_a_long_text_is_refused_or_cut_as_by_transformers(worker: WorkerProcess) -> None:
    text = "one two three four " * 100
    error = worker.post("/v1/embeddings", input=text).json()["error"]
    assert error["param"] == "input" and "256 tokens" in error["message"] and "402 tokens" in error["message"]
    for limit, most in ((-1, 256), (20, 20)):
        (one,) = worker.post("/v1/embeddings", input=text, truncate_prompt_tokens=limit).json()["data"]
        np.testing.assert_allclose(one["embedding"], reference(real_model(MINILM), [text], most)[0], rtol=0, atol=1e-5)


def test_documents_are_ranked_by_the_cosine_with_the_query(worker: WorkerProcess) -> None:
    query, *documents = reference(real_model(MINILM), TEXTS[:4])
    results = worker.post("/rerank", query=TEXTS[0], documents=TEXTS[1:4]).json()["results"]
    assert [each["index"] for each in results] == list(np.argsort([-query @ each for each in documents])) and results[0]["index"] == 0
    np.testing.assert_allclose(
        [each["relevance_score"] for each in results], sorted((query @ each for each in documents), reverse=True), atol=1e-5
    )


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "no language-modelling head: it makes embeddings"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "no language-modelling head"),
        ("/classify", {"input": "a"}, "no classification head"),
        ("/rerank", {"query": "a", "documents": ["b"], "use_activation": False}, "use_activation: only for models with a head"),
    ],
)
def test_what_the_model_cannot_do_is_said(worker: WorkerProcess, path: str, body: dict[str, object], says: str) -> None:
    answer = worker.post(path, **body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


def test_ranks_share_no_encoder() -> None:
    with pytest.raises(ModelLoadError, match="BertModel is an encoder, which is served by one process: leave out --tensor-parallel-size"):
        load_model(f"file://{real_model(MINILM)}")
