"""Mutants that no test can kill, for nothing that can be observed differs: by file, the mutant and why."""

EQUIVALENT: dict[str, dict[str, str]] = {}
