"""`lockstep doctor`: what is installed here, whether it fits together, what to do. For `kernels` and all above.

Nothing here imports torch, transformers or a device package: the doctor must still speak when those do not load.
"""
