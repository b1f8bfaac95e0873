"""The output of a run: folder, files, metrics, console. May be imported by `data`, `model`, `tape` and layers above."""
