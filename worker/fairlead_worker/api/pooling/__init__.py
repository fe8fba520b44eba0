"""Pooling models: embeddings, scores and reranking."""
