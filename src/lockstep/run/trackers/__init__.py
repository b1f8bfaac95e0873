"""One file an outside tracker; each imports its package inside itself only. For `run` alone."""
