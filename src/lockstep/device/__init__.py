"""The devices and their properties. May be imported by `kernels` and the layers above it; does not import torch."""

from lockstep.device import process_setup

# Must run before the first `import torch`.
process_setup.defer()
process_setup.wait_asleep()
process_setup.follow_quota()
