"""Post-training of language models, the same on every device.

Importing the package is cheap on purpose: nothing here pulls in torch. Each module imports what it needs.
"""

__version__ = "0.1.0"
