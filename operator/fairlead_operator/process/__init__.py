"""The operator's process: start and end, health, metrics and memory."""
