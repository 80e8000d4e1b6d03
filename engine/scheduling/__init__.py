"""Scheduling: how many tokens each request computes in the next step."""
