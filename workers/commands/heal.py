"""`kvrelay heal`: train the adapters of the `smol` family's small sibling. Takes hours on two cores, minutes on a GPU.

It can be stopped and started again; it goes on from its last checkpoint. The result is `adapters.safetensors` in the
output folder; put it into `workers/families/smol/`, prepare again, and refit the bundle.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from threading import Event

from mappers.fingerprint import default_cache_folder
from workers.families.smol import family, prepare_large

# Layers 18 to 23 are left out and the 6 above them healed: the lower 18 stay the large model's own, so that their keys
# and values pass between the two unchanged. Other cuts heal faster and map worse.
KEPT = tuple(layer for layer in range(30) if not 18 <= layer <= 23)
ADAPTED = KEPT[18:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvrelay heal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens to train on (default %(default)s)")
    parser.add_argument("--rank", type=int, default=48)
    parser.add_argument("--start", type=Path, metavar="FILE", help="begin from these adapters, e.g. the committed ones")
    parser.add_argument("--out", type=Path, default=default_cache_folder() / "heal", help="checkpoints and the result")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mappers.data import documents
    from workers.training.heal import HealRecipe, HealRun

    smol = family()
    prepare_large(say)
    recipe = HealRecipe(kept=KEPT, adapted=ADAPTED, rank=options.rank)
    tokenizer = AutoTokenizer.from_pretrained(smol.target)
    rendered = documents(smol.conversations(), "heal", tokenizer)
    windows = (torch.tensor(ids[: recipe.sequence]) for ids in rendered if len(ids) >= recipe.sequence)
    wanted = list(islice(windows, 1 + options.tokens // recipe.sequence))
    say(f"{len(wanted)} windows of {recipe.sequence} tokens")
    teacher = AutoModelForCausalLM.from_pretrained(smol.target, dtype=torch.float32).eval()
    run = HealRun(teacher.to(options.device), recipe, options.out, say, options.start, _on_signal())
    result = run.train(wanted, options.tokens)
    say(f"adapters are in {result}")
    return 0


def _on_signal() -> Callable[[], bool]:
    """Whether SIGTERM or SIGINT came: the step in hand is finished and kept."""
    raised = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: raised.set())
    return raised.is_set


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)
