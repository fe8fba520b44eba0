"""Structured output: constraints of requests, their grammars, the compiler (llguidance), and the process that checks grammars before the
engine.

Imports no torch. The API process imports only `constraint`.
"""
