"""What a study came to, for people and for programs."""
