"""The training loops and their stages. For `parity` and the command line."""
