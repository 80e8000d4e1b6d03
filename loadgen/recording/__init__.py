"""Recording of live traffic as a trace."""
