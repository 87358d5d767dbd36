"""Which threads of a worker share their work out among the cores."""

from __future__ import annotations

import threading

import torch


def share_out_here(num_threads: int) -> None:
    """This thread's work goes to `num_threads`, that of threads which have not yet used torch stays theirs alone.

    A second thread that shared its work out would have helpers of its own, and once there are more of them than cores,
    libgomp has all sleep between two products instead of spinning: a prompt takes a fifth longer.
    """
    torch.set_num_threads(num_threads)  # for all threads that have not yet looked
    torch.get_num_threads()
    following = threading.Thread(target=torch.set_num_threads, args=(1,))
    following.start()
    following.join()
