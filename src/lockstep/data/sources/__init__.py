"""Reads rows from the paths of a recipe: files, formats, hub data sets, user readers, mixing order."""
