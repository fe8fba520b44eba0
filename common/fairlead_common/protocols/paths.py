"""The paths of the inference APIs."""

from typing import Final

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
"""`/v1` as in Jina's API, `/v2` as in Cohere's."""
CLASSIFICATIONS = ("/classify", "/v1/classify")
"""vLLM's path, and SGLang's."""
POOLING = "/pooling"
"""vLLM's form of embeddings."""
POOLED = (EMBEDDINGS, POOLING, *SCORES, *RERANKS, *CLASSIFICATIONS)
"""Paths whose responses are computed from pooled hidden states. They generate no text."""
COMPUTED: Final = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, *POOLED)
"""Paths whose requests the engine computes."""
TOKENIZED: Final = (COUNT_TOKENS, "/tokenize", "/detokenize")
"""Paths whose requests need a worker but not its engine. Quota and queue apply to them too: tokenizing can cost seconds of CPU."""
INVOCATIONS = "/invocations"
"""SageMaker's only inference path: the fields of the body choose the API. Only workers serve it."""
NO_GENERATION = "generation_not_served"
"""Error code of the 400 that a model without a language model head returns for every other path."""
NO_EMBEDDINGS = "embeddings_not_served"
"""Error code of the 400 that a classifier returns for embeddings."""
