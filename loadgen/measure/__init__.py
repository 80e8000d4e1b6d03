"""From records to figures, and whether to believe them."""
