"""The prefix index: latency under load and by the size of the fleet."""
