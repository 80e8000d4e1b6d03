"""Static batching and the two tracks of V0, on the same runners as the unified scheduler."""
