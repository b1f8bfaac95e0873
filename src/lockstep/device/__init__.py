"""The devices and their properties. May be imported by `kernels` and the layers above it; does not import torch."""

from lockstep.device import process_setup

# These settings must be made before the first `import torch`.
process_setup.defer()
process_setup.wait_asleep()
process_setup.follow_quota()
