"""The package version and the package folder, for modules that must not import the package root."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE_FOLDER = Path(__file__).parent
