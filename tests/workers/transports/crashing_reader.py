"""A reader process that opens pools, reads, reports it, and then waits to be killed.

python -m tests.workers.transports.crashing_reader SECRET < one JSON ticket per line
"""

from __future__ import annotations

import sys
import time

from workers.api.schemas import Ticket
from workers.transports.readers import Readers


def main() -> None:
    readers = Readers(sys.argv[1])
    for line in sys.stdin:
        ticket = Ticket.model_validate_json(line)
        reader = readers.get(ticket.pool.kind, ticket.pool, ticket.layout)
        reader.read(ticket.blocks, ticket.generations, 0, ticket.num_tokens)
        sys.stdout.write("read\n")
        sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main()
