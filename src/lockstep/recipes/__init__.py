"""The built-in recipes, as YAML files. No code lives here, and nothing is imported from it."""
