"""The checklist: common manual checks, run on the first recorded step."""
