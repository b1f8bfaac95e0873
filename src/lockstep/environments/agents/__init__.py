"""Agents: programs that talk to the policy over OpenAI's API, and return a reward."""
