"""Everything that is refused before weights load: checks, trials, the batch plan and the memory plan."""
