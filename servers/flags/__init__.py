"""Flags: as words, as a command, by engine and version, and the rules between them."""
