"""Structured output: what a request may say, as a grammar; its compiler (llguidance), and the process that tries one before the engine
sees it. No torch: both the API's and the engine's side import it."""
