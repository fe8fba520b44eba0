"""API reference: the OpenAPI document, and notes on each request field."""
