"""From the paths of a recipe to rows: files, formats, hub data sets, user readers, and the order of mixed sources."""
