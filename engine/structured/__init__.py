"""Structured outputs, compiled to grammars."""
