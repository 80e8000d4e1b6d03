"""Targets that can be started with flags."""
