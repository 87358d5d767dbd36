"""`kvrelay heal`: train the adapters of the `smol` family's small sibling.

This takes hours on two cores, minutes on a GPU. It can be stopped and started again, and resumes from its last
checkpoint. The result is `adapters.safetensors` in the output folder; copy it to `workers/families/smol/`, prepare
again, and refit the bundle.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from mappers.errors import MapperError
from mappers.fingerprint import default_cache_folder
from tools.measuring import count
from workers.families.smol import family, prepare_large

if TYPE_CHECKING:
    from tools.training.heal import HealRecipe

# 24 of 30 layers. The lower 20 stay the large model's own, so that their keys and values (and layer 20's) pass between
# the two unchanged: the mapped quality depends on that most. Of the upper ten, every third is kept and healed; that
# comes closer to the large model than the six uppermost do.
KEPT = (*range(20), 20, 23, 26, 29)
ADAPTED = (20, 23, 26, 29)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvrelay heal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=count, default=520_000, help="training tokens, with repeats (%(default)s)")
    parser.add_argument("--passes", type=count, default=4, help="passes over each document (%(default)s)")
    parser.add_argument("--rank", type=count, default=72, help="rank of the adapters (%(default)s)")
    parser.add_argument("--start", type=Path, metavar="FILE", help="begin from these adapters, e.g. the committed ones")
    parser.add_argument("--out", type=Path, default=default_cache_folder() / "heal", help="checkpoints and the result")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)

    from tools.training.heal import HealRecipe

    recipe = HealRecipe(kept=KEPT, adapted=ADAPTED, rank=options.rank, passes=options.passes)
    try:
        _check(options, recipe)
    except (MapperError, ValueError) as error:
        parser.error(str(error))
    try:
        return _heal(options, recipe)
    except MapperError as error:
        print(f"kvrelay heal: {error}", file=sys.stderr)
        return 1


def _check(options: argparse.Namespace, recipe: HealRecipe) -> None:
    """Check the options before a model is prepared. Raises `MapperError`, `ValueError`."""
    from mappers.commands.common import check_device
    from tools.training.heal import load_state

    check_device(options.device)
    if options.tokens < recipe.step_tokens:
        raise ValueError(f"--tokens {options.tokens}: must be at least {recipe.step_tokens}, which is one step")
    if options.start is not None and not options.start.is_file():
        raise ValueError(f"--start {options.start}: there is no such file")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file; expected a folder")
    load_state(options.out, recipe)


def _heal(options: argparse.Namespace, recipe: HealRecipe) -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mappers.data import documents
    from tools.training.heal import HealRun

    # 1. The teacher and its documents, as windows of equal length
    smol = family()
    prepare_large(_say)
    tokenizer = AutoTokenizer.from_pretrained(smol.target)
    rendered = documents(smol.conversations(), "heal", tokenizer)
    windows = (torch.tensor(ids[: recipe.sequence]) for ids in rendered if len(ids) >= recipe.sequence)
    wanted = list(islice(windows, 1 + options.tokens // (recipe.sequence * recipe.passes)))
    _say(f"{len(wanted)} windows of {recipe.sequence} tokens")
    teacher = AutoModelForCausalLM.from_pretrained(smol.target, dtype=torch.float32).eval()
    # 2. Train; a signal stops the run after the current step, with a checkpoint
    stopped = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    run = HealRun(teacher.to(options.device), recipe, options.out, _say, options.start, stopped.is_set)
    result = run.train(wanted, options.tokens)
    _say(f"adapters are in {result}")
    return 0


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)
