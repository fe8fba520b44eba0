"""One request: the call, and what its body says."""
