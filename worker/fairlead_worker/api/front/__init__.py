"""What stands in front of the API: connections within their bounds and, if configured, CORS, API keys, traces and ids for the log."""
