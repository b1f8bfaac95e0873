"""The built-in recipes as YAML files. This package contains no code."""
