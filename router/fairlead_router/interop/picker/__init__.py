"""Endpoint picker of the Gateway API inference extension: a gateway queries over gRPC which worker gets a request.

It shares the policy, worker table and tokenization of the proxy. See docs/guides/endpoint-picker.md.
"""
