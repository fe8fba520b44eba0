"""What the operator asks of routers, workers and the API server again and again."""
