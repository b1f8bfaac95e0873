"""The tape of a run: a recording of the tensors that another device needs to repeat the run and compare its results."""
