"""Turn a request body into engine requests, and engine outputs into text, log-probabilities and finish reasons."""
