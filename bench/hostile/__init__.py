"""What hostile clients send, for `router/hostile_clients`."""
