"""HTTP/1.1 on sockets: client connections and their replies, and pooled connections to workers.

It enforces limits and has no notion of prompts, tenants or policies.
"""
