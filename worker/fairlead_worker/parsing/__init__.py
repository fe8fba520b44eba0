"""Output parsers: separate reasoning and tool calls from text, in the format of the model's family.

Tables and small state machines without torch or I/O. Imports no other package of the worker; plug-ins of other packages add formats.
"""
