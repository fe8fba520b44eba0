"""What stands in front of the API if the configuration asks for it: CORS, API keys, traces and ids for the log."""
