"""The prefix index: memory, lookups, latency under load, recovery."""
