"""`fairlead migrate`: manifests and Helm values of other systems as InferenceServices."""
