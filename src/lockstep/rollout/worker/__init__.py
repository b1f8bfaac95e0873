"""A process that generates with weights of its own while the run trains. For `rollout` and all that may import that."""
