"""Tenants: API keys, token rates, body budget and usage."""
