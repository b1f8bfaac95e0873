"""Processes that run a user's function, with limits, and can be killed. For `data` and `reward`; it may import `run`.

Nothing heavy is imported here: they must start in a moment.
"""
