"""The endpoint picker of the Gateway API inference extension: a gateway asks over gRPC which worker gets a request.

The same policy, worker table and tokenization as the proxy: who asks is the only difference. docs/endpoint-picker.md.
"""
