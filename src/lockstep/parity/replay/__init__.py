"""A recorded run repeated elsewhere: a verdict a stage, and where it parts. For `parity` and the command line."""
