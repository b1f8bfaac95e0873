"""The built-in recipes as YAML files. The package `recipes` contains no code."""
