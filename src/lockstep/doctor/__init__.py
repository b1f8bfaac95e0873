"""`lockstep doctor`: what is installed, whether it fits together, and what to do. For `kernels` and all above.

Nothing here imports torch, transformers or a device package: the doctor must work when those do not load.
"""
