"""`lockstep doctor`: reports installed versions, problems and remedies. Used by `kernels` and higher layers.

Nothing in this package imports torch, transformers or a device package, because the doctor must work when they do not
load.
"""
