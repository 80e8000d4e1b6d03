"""What a server is: flags, metrics, logs, objectives. Imports nothing of ours."""
