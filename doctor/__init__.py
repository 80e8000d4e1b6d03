"""Metrics in, findings and prescriptions out."""
