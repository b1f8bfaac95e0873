"""The devices and their properties. Used by `kernels` and all above; importing it does not import torch."""

from lockstep.device import process_setup

# Must run before the first `import torch`.
process_setup.defer()
process_setup.wait_asleep()
process_setup.follow_quota()
