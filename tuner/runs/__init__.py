"""The load of a trial, and what came of it."""
