"""Built-in tools and environments, by name: `rollout.tools: [calculator]`, `rollout.environment: guess_number`."""
