"""What may be varied, and what a config must hold before it is launched."""
