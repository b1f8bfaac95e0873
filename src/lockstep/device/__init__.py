"""The devices and their properties. `kernels` and the layers above it may import this package. The package itself does
not import torch."""

from lockstep.device import process_setup

# These settings must be made before the first `import torch`.
process_setup.defer()
process_setup.wait_asleep()
process_setup.follow_quota()
