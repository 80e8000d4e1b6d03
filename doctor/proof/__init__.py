"""Cures, proven by comparison."""
