"""What a verb of the command line does beyond one call. Imported by `cli.py` alone."""
