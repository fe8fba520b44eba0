"""Other CPU servers for `end_to_end/cpu_servers` and other routers for `router/proxy`: how they are installed, started and loaded.

Reading order: `model` (what is served), `environments` (how each server is installed), `servers` (how each is started), `process` (a
running server and its cost), `answers` (a check of its answers), `load` (the client), `ratios` (the targets).
"""
