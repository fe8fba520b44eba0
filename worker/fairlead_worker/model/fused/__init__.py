"""Small operations of a model's layers done by one kernel each: norms with their residual, gated activations, rotary embeddings."""
