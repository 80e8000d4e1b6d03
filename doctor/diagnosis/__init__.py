"""Playbooks in, findings and prescriptions out."""
