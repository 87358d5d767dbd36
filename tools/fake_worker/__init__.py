"""`FakeWorker`: speaks the worker's contract without a model, and does what a test tells it to.

    small = FakeWorker("small-0", "fake-small")
    large = FakeWorker("large-0", "fake-large", peers={"small-0": small})
    large.fail("transfer", TransferFailed("the source is gone"))

It is an ASGI application: serve it with uvicorn, or call it in process. Tokens are words, a cache is a list of them,
and every rule of the contract about caches holds: salts, epochs, expiry, exact and mapped, the longest common prefix.
An answer names the model and a checksum of its prompt, so that an answer to another prompt is told from the right one.

    faults.py   what a test told it to do wrong, and the calls it got
    caches.py   tokens, and the caches of them
    answers.py  an answer as a stream of frames
    wire.py     bodies in, replies out
    worker.py   the calls of the contract
"""

from tools.fake_worker.caches import Cache, common, render
from tools.fake_worker.faults import Call, Fault
from tools.fake_worker.worker import FAKE_SECRET, FakeWorker

__all__ = ["FAKE_SECRET", "Cache", "Call", "FakeWorker", "Fault", "common", "render"]
