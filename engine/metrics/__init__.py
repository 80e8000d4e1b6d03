"""vLLM's metric families and log lines: what a step adds to them, and how they are shown."""
