"""End-to-end tests: a real Kubernetes, real pods, real clients. May import everything; nothing imports it."""
