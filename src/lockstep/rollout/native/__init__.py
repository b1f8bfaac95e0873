"""The native engine: the policy with a paged KV cache. For `rollout` and its importers."""
