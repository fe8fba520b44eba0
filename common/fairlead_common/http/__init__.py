"""HTTP/1.1 on the server's side: message framing, connection limits and path checks, for the router and the worker."""
