"""Endpoints for operators and the router: adapters, health, load, tokenization, prefix warm-up."""
