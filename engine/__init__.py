"""A compact LLM engine that behaves like vLLM V1."""
