"""`lockstep doctor`: reports installed versions, problems and remedies. For `kernels` and higher import layers.

Nothing in this package imports torch, transformers or a device package, because the doctor must work when these
packages do not load.
"""
