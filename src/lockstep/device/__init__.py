"""The devices and their facts. For `kernels` and all above; importing it is cheap and does not import torch."""

from lockstep.device import process_setup

# Must run before the first `import torch`.
process_setup.defer()
process_setup.wait_asleep()
process_setup.follow_quota()
