"""The baseline of `kvrelay bench`: plain transformers prefilling a prompt in one pass (SDPA), as its own process.

    python -m workers.plain MODEL --threads N

Reads one JSON list of token ids per line from standard input, and writes `{"prefill_ms": ...}` for each: the time to
the logits of the last position, with a cache, as `generate` does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.plain", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    for line in sys.stdin:
        sys.stdout.write(json.dumps({"prefill_ms": prefill_ms(model, json.loads(line))}) + "\n")
        sys.stdout.flush()
    return 0


@torch.inference_mode()
def prefill_ms(model: torch.nn.Module, token_ids: list[int]) -> float:
    started = time.perf_counter()
    model(input_ids=torch.tensor(token_ids)[None], use_cache=True, logits_to_keep=1)
    return 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
