"""What a run leaves and shows: folder, files, metrics, console. For `data`, `model`, `tape` and all above."""
