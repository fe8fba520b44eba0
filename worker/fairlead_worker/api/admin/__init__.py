"""Endpoints for operators and the router: adapters, health, load, metrics, prefix warm-up."""
