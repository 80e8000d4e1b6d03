"""Training of what speculation proposes with."""
