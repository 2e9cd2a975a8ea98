"""specgen turns a file of prompts into a file of answers, with multi-token prediction as a matter of speed alone.

Knows its own version; imports nothing heavy, so that `specgen --help` is quick.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("specgen")
except PackageNotFoundError:  # the source tree is on the path without having been installed
    __version__ = "0.0.0+unknown"

__all__ = ["__version__"]
