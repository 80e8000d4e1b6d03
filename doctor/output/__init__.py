"""A diagnosis as text, Markdown and JUnit."""
