"""A worker process that generates with a copy of the weights while the run trains. Imported by `rollout` and above."""
