"""What is tried next."""
