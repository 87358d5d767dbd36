"""Progress bars of the libraries that load and convert models: for a terminal, and noise in a file or a pipe."""

from __future__ import annotations

import os
import sys


def hide_from_files() -> None:
    """To be called before a library that draws them is imported; holds for the processes that are started, too."""
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
