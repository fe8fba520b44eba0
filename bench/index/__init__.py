"""The prefix index: latency under load."""
