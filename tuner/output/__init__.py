"""What a study shows while it runs, and the folder it writes."""
