"""From a request of the worker API to its answer: prompt, reuse, prefill, decoding, storing. Knows no HTTP.

prefill.py     prompts to token ids, and prefixes prefilled ahead of requests
reuse.py       KV between the pool and a sequence
generation.py  one answer
transfer.py    handoffs from other workers
idle.py        work for idle time: mapped caches upgraded to exact ones
shadow.py      mapped caches compared with native ones
worker.py      the object graph of a worker
"""
