"""The checklist: runs common manual checks on the first recorded step."""
