"""The OpenAI server around the engine process."""
