"""`fairlead check`: whether and how a worker would serve a model, from its config and the headers of its weights."""
