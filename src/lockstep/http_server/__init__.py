"""The HTTP server of `lockstep serve`, of `lockstep view` and of agents: types, limits and JSON bodies."""
