"""`lockstep doctor`: reports what is installed, incompatibilities and remedies. `kernels` and the layers above it may
import this package.

Nothing in this package imports torch, transformers or a device package, because the doctor must work when they do not
load.
"""
