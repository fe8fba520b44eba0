"""The OpenAI-compatible HTTP API of one replica."""
