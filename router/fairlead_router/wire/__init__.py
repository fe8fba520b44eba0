"""Bytes on sockets: a client's connection and its answer on one side, kept connections to workers on the other.

Knows HTTP/1.1 and bounds; nothing of prompts, tenants or policies.
"""
