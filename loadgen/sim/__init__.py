"""The load in virtual time."""
