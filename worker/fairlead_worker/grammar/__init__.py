"""Structured output: what a request may say, as a grammar; its compiler (llguidance), and the process that tries one before the engine
sees it. No torch; and the API's process imports `constraint` alone."""
