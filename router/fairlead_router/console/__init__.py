"""The web console at `/ui` (`--console`): live fleet and recent requests, rendered on the server."""
