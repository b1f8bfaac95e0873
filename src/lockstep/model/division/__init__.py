"""How the modules of a model are divided over tensor- and expert-parallel ranks, and trials of the division."""
