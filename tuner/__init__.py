"""Searches server flags against SLOs with Optuna."""
