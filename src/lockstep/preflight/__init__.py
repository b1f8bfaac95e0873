"""Checks that run before weights load: recipe, data and model checks, trial calls, the batch plan, the memory plan."""
