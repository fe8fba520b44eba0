"""From logits to tokens: penalties, masks, filters, noise and the draw."""
