"""LoRA adapters: their files, their layers, and the slots that they share."""
