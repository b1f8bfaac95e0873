"""The native engine: the policy with a paged KV cache. May be imported by `rollout` and the layers above it."""
