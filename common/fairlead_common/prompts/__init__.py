"""Tokenization of requests and detokenization of completions, the same in the router and in the worker."""
