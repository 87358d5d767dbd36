"""`python -m workers`: one worker process."""

from __future__ import annotations

import sys

from workers.commands.worker import main

sys.exit(main())
