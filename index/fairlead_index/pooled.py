"""Paths whose answers are made of pooled hidden states: no text is generated for them."""

EMBEDDINGS = "/v1/embeddings"
SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
"""The second and third as clients of Jina's and of Cohere's API have them."""
POOLED = (EMBEDDINGS, *SCORES, *RERANKS)
