"""Response models: the schemas of `GET /openapi.json`. The handlers build their JSON themselves, and tests compare it with these."""
