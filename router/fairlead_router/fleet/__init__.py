"""The router's view of the workers: discovery, health, load, and prompt formats."""
