"""Status of the endpoint: routers, their certificate, the Gateway in front of them, and the models of other services. Pure."""
