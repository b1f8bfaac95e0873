"""The built-in engine: the policy itself over a paged KV cache. For `rollout` and all that may import that."""
