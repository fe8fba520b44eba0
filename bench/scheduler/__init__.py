"""The scheduler: its own cost, and what its policies do to latency and throughput."""
