"""The study: baseline, search, confirmation."""
