"""Models whose weights are stored quantised."""
