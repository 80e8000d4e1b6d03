"""Metric names by version, the exposition format, and functions over ranges."""
