"""The native engine: the policy with a paged KV cache. `rollout` and higher layers may import this package."""
