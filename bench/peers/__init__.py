"""Fairlead's worker beside the fastest CPU servers there are, one client, one load: `python -m bench.peers`, or `make bench-peers`.

Reading order: `model` (what is served), `environments` (how each peer is installed), `servers` (how each is started), `running` (a server's
life and cost), `load` (the client), `ratios` (what is asked), `__main__` (the order of things and the report).
"""
