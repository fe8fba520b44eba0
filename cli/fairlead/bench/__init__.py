"""`fairlead bench serve`: streaming load against any OpenAI server.

`datasets` makes the prompts (token ids), `client` sends one and takes its times, `load` sends them on schedule, `report` computes
figures under the names that `vllm bench serve` uses.
"""
