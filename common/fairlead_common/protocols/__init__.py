"""Request bodies and errors of the HTTP APIs beside chat completions, converted to and from those of chat completions.

Pure functions. Router and worker share them, so that both interpret a request equally. A protocol's module has its fields (`...Body`), the
conversion (`convert`) and the names that differ.
"""
