"""What the guides of the field check by hand, done on the first recorded step."""
