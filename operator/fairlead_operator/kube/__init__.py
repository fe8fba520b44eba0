"""The Kubernetes API: client, watches, cache, leader election, events and server-side apply's differences."""
