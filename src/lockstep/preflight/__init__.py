"""The checks that run before the model's weights load: recipe, data and model checks, trial calls, batch plan, memory
plan."""
