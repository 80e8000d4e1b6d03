"""Alerts and dashboards, generated from the rules."""
