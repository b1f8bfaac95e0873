"""One file per external tracker; each imports its package on use. Used only by `run`."""
