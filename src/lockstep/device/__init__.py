"""The devices and the facts about each. Importing this package is cheap: nothing here pulls in torch."""

from lockstep.device import autoload, threads

# Before the first `import torch`, which is the only moment at which they help.
autoload.defer()
threads.wait_asleep()
