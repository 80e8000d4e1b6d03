"""The schedulers of the years before: to be run beside the unified one, on the same runners."""
