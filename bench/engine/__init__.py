"""The engine in one process: forward pass, sampling, speculation, structured output, host cache."""
