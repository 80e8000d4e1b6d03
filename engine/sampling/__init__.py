"""From logits to tokens: sampling, and lossless acceptance of drafts."""
