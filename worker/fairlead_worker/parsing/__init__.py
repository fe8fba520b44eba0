"""Answers read back: reasoning and tool calls told apart from text, by the format of the model's family. Tables and small state machines;
no torch, no I/O. Imports nothing of the worker but its own files."""
