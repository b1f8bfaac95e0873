"""`lockstep doctor`: what is installed here, whether it fits together, and what to do where it does not.

Nothing here imports torch, transformers or a device package: the doctor must still speak when those do not load.
"""
