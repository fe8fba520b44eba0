"""The API process and its engine: start and monitor the process, send requests, receive outputs, publish cache events to the index."""
