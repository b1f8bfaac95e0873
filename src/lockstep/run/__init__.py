"""The output of a run: folder, files, metrics, console. Used by `data`, `model`, `tape` and all above."""
