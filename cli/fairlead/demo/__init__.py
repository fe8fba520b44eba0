"""`fairlead demo`: what the router's steering is worth, on this machine, in a minute.

`conversations` are the texts, `play` holds them, `compare` lays two runs side by side and checks the promise.
"""
