"""`lockstep doctor`: reports what is installed, incompatibilities and remedies. Used by `kernels` and all above.

Nothing here imports torch, transformers or a device package: the doctor must work when those do not load.
"""
