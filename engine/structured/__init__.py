"""Structured outputs: forms compiled to grammars."""
