"""Command lines and scripts of verl and OpenRLHF, as recipes of ours. Every difference is said, nothing is dropped."""
