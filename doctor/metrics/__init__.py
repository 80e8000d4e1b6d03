"""Windows of metrics and the signals that are computed from them."""
