"""Any transformers causal LM, its attention replaced by ours, called on packed `[1, tokens]` inputs."""
