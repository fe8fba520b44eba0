"""The operator with a thousand services and five thousand pods on a real API server, on one machine."""
