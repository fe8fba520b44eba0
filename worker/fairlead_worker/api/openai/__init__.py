"""OpenAI completions and chat completions: `POST /v1/completions` and `POST /v1/chat/completions`."""
