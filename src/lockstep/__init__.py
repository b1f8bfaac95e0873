"""Post-training of language models, the same on every device.

Importing the package is cheap on purpose: nothing here pulls in torch. Each module imports what it needs.
"""

# Before anything imports torch: a device package that torch would load by itself must not be able to break that import.
import lockstep.device  # noqa: F401

__version__ = "0.1.0"
