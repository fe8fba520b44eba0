"""The router: its own cost, its decisions, and other routers under the same load."""
