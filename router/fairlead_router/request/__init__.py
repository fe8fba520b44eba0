"""One client request: its headers, body, prompt and parameters."""
