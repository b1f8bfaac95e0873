"""The tape of a run: what another device needs to repeat it. For `rollout`, `reward` and all above them."""
