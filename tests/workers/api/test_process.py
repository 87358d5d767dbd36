from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios

import pytest

CODE = """
from workers.api.process import hide_progress_bars
hide_progress_bars()
from tqdm.auto import tqdm
for _ in tqdm(range(3), desc="Loading weights"):
    pass
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_bars_appear_on_a_terminal_only(is_terminal: bool) -> None:
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        termios.tcsetwinsize(writer, (24, 80))
    subprocess.run([sys.executable, "-c", CODE], stderr=writer, check=True)
    os.close(writer)
    output = os.read(reader, 4096)
    os.close(reader)
    assert (b"Loading weights" in output) is is_terminal
