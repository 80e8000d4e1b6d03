"""The shape of an 8B Llama, for what only estimates."""

from benchmarks.engine.shapes import shape

CONFIG = shape("8B", 8192)
