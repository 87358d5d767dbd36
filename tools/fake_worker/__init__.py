"""`FakeWorker`: the worker contract without a model, with faults that a test sets.

    small = FakeWorker("small-0", "fake-small")
    large = FakeWorker("large-0", "fake-large", peers={"small-0": small})
    large.fail("transfer", TransferFailed("source is gone"))

It is an ASGI application: serve it with uvicorn, or call it in process. Tokens are words, a cache is a list of words.
Every cache rule of the contract holds: salts, epochs, expiry, exact and mapped, longest common prefix. An answer has
the model's name and a checksum of its prompt, so that answers to different prompts differ.

    worker.py   calls of the contract, and faults
    model.py    tokens, caches, and answers as streams of frames
"""

from tools.fake_worker.model import render
from tools.fake_worker.worker import FAKE_SECRET, FakeWorker, fingerprint

__all__ = ["FAKE_SECRET", "FakeWorker", "fingerprint", "render"]
