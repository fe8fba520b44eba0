"""What stands in front of the API: if configured, CORS, API keys, traces and ids for the log."""
