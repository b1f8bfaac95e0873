"""The tape of a run: what another device needs to repeat it with nothing left to chance."""
