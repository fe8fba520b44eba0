"""Embeddings, scores, reranking and classification."""

from fairlead_common.protocols.paths import CLASSIFICATIONS, EMBEDDINGS, POOLING, RERANKS, SCORES
from fairlead_worker.api.answers.pooling import ClassificationList, EmbeddingList, PooledList, Ranking, ScoreList
from fairlead_worker.api.pooling import classify, embeddings, similarity
from fairlead_worker.api.pooling.schema import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from fairlead_worker.api.routes.operation import Operation

TAG = "Pooling"


def _id(name: str, path: str) -> str:
    """Return `score` for `/score` and `score_v1` for `/v1/score`."""
    version = path.split("/")[1]
    return f"{name}_{version}" if version != name else name


OPERATIONS = (
    Operation(
        *("POST", EMBEDDINGS, "create_embedding", "Embed texts", embeddings.embeddings),
        answer=EmbeddingList,
        body=EmbeddingRequest,
    ),
    Operation(
        *("POST", POOLING, "create_pooling", "Embed texts, in vLLM's form", embeddings.embeddings),
        answer=PooledList,
        body=EmbeddingRequest,
    ),
    *(
        Operation(
            *("POST", path, _id("score", path), "Score pairs of texts", similarity.score),
            answer=ScoreList,
            body=ScoreRequest,
        )
        for path in SCORES
    ),
    *(
        Operation(
            *("POST", path, _id("rerank", path), "Rank documents by their similarity to a query", similarity.rerank),
            answer=Ranking,
            body=RerankRequest,
            required=("query", "documents"),
        )
        for path in RERANKS
    ),
    *(
        Operation(
            *("POST", path, _id("classify", path), "Classify texts", classify.classify),
            answer=ClassificationList,
            body=ClassifyRequest,
            required=("input",),
        )
        for path in CLASSIFICATIONS
    ),
)
