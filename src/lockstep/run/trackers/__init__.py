"""The trackers, one per file. Only that file imports the tracker's package. May be imported only by `run`."""
