"""Checkpoints, configs, tokenizers and the one decoder."""
