"""The API process and its engine: start and watch the process, send requests, receive outputs, publish cache events to the index."""
