"""The output of a run: folder, files, metrics, console. `data`, `model`, `tape` and higher layers may import it."""
