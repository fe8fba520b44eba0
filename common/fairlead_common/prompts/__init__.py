"""Requests to token ids and back, the same in the router and in the worker."""
