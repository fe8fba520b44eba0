"""The form of an answer: which tools it may call, the grammar that it follows, and the parsers that read it."""
