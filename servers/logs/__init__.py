"""What servers write: start, periodic load lines, and why they ended."""
