"""The embedded default: one Hugging Face model in this process, on the CPU or one GPU."""
