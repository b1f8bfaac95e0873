"""What the guides of the field check by hand, done on the first recorded step. For `parity` and the command line."""
