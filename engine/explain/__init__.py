"""What the scheduler decides, step by step, with no model."""
