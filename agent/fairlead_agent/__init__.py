"""The engine sidecar: it makes a vLLM or SGLang server a worker of Fairlead, for routers, the index, the operator and dashboards."""
