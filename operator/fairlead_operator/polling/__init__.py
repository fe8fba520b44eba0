"""Periodic polls of routers, workers and the API server."""
