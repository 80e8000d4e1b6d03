"""Targets, load, records, statistics, comparison."""
