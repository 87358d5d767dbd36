"""The embedded default engine: one Hugging Face model in this process, on the CPU or one GPU.

engine.py   the engine and its sequences, sampling, loading
memory.py   the KV of one running sequence
forward.py  changes to the model's forward pass on the CPU, and batched decoding
"""
