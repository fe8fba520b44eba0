"""`fairlead demo`: the gain of prefix-aware routing, shown on this machine in about a minute.

`conversations` has the texts, `play` sends them, `compare` compares two runs and checks the promise.
"""
