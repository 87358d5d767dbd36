"""Make a small sibling of a model: leave layers out, then heal the rest by distillation.

The lower layers, up to the first one that is adapted or follows the cut, stay the teacher's own: one forward pass
serves both models up to there, and their keys and values pass between the two unchanged. The adapters above learn to
give the teacher's next-token distribution (KL on a random share of the positions), its last hidden state, and what the
teacher gives to each layer that is kept: a layer learns to do the work of those left out behind it.

    teacher   0 ── ... ── 19 ── 20  ── 21 ── 22 ── 23  ── 24 ── 25 ── 26  ── ... ── 29  ── head
                          │                   hidden states match here │    then the distribution
    sibling    (shared)   └──── 20' ────────────── 23' ────────────── 26' ───────── 29' ── head

The first layer of its own reads what the teacher's reads, so its key and value maps stay the teacher's too.

Knows nothing of mapping or of workers. Source of the idea: Minitron, https://arxiv.org/abs/2407.14679.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.training import lowrank

STATE = "state.pt"  # in a run's folder


@dataclass(frozen=True)
class HealRecipe:
    """What to keep and how to train. `kept` and `adapted` are layer numbers of the teacher. Each document is read
    `passes` times, but by the teacher only once."""

    kept: tuple[int, ...]
    adapted: tuple[int, ...]
    rank: int = 48
    sequence: int = 512
    batch: int = 1
    passes: int = 1
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    decay_share: float = 0.25
    scored_share: float = 0.33
    final_weight: float = 0.5
    hidden_weight: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if list(self.kept) != sorted(set(self.kept)):
            raise ValueError(f"kept layers must rise: {self.kept}")
        if not set(self.adapted) <= set(self.kept):
            raise ValueError(f"adapted layers {sorted(set(self.adapted) - set(self.kept))} are not kept")

    @property
    def num_shared(self) -> int:
        """Layers that both models run alike: the first ones, neither moved nor adapted."""
        alike = (i for i, layer in enumerate(self.kept) if layer != i or layer in self.adapted)
        return next(alike, len(self.kept))

    @property
    def own(self) -> tuple[int, ...]:
        """The kept layers that the sibling does not share with the teacher."""
        return self.kept[self.num_shared :]

    @property
    def frozen(self) -> tuple[str, ...]:
        """Maps of the first own layer that need no adapter: the teacher's are right for what it reads."""
        return ("k_proj", "v_proj") if self.own[:1] == (self.num_shared,) else ()

    @property
    def step_tokens(self) -> int:
        return self.batch * self.sequence

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Warm up, hold, then fall linearly to a twentieth over the last `decay_share` of the steps."""
        decay_steps = max(1, int(num_steps * self.decay_share))
        left = (num_steps - step) / decay_steps
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * max(0.05, min(1.0, left))


class Sibling(nn.Module):
    """The layers above the shared ones, and the final norm. The teacher lends everything else."""

    def __init__(self, teacher: Any, recipe: HealRecipe):
        super().__init__()
        generator = torch.Generator().manual_seed(recipe.seed)
        self.layers = nn.ModuleDict()
        for index, kept in enumerate(recipe.own, start=recipe.num_shared):
            layer = copy.deepcopy(teacher.model.layers[kept]).requires_grad_(False)
            if kept in recipe.adapted:
                lowrank.attach(layer, recipe.rank, generator, recipe.frozen if kept == recipe.own[0] else ())
            self.layers[str(index)] = layer

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


def run_layers(layers: Sequence[nn.Module], hidden: Tensor, rope: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The hidden state after each layer, (B, T, C) each; attention is causal over the T tokens."""
    states = []
    for layer in layers:
        hidden = layer(hidden, position_embeddings=rope, attention_mask=None)
        states.append(hidden)
    return states


def distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean squared error as a share of the variance over tokens, the first tokens (attention sinks) left out."""
    ours, theirs = ours[:, 4:], theirs[:, 4:]
    return (ours - theirs).square().mean() / (theirs - theirs.mean(1, keepdim=True)).square().mean()


@torch.no_grad()
def lesson(teacher: Any, recipe: HealRecipe, tokens: Tensor) -> Tensor:
    """What the teacher makes of token ids (B, T): its hidden state before each layer of the sibling's own, and after
    its last one. (S, B, T, C) for S - 1 own layers."""
    hidden = teacher.model.embed_tokens(tokens)
    states = [hidden, *run_layers(list(teacher.model.layers), hidden, rope_of(teacher, hidden))]
    return torch.stack([states[layer] for layer in (recipe.num_shared, *recipe.own[1:], len(states) - 1)])


def distillation_loss(teacher: Any, sibling: Sibling, recipe: HealRecipe, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, KL in nats a token) of one batch, given as its `lesson`."""
    with torch.no_grad():
        their_final = teacher.model.norm(theirs[-1]).flatten(0, 1)  # (B*T, C)
        num_scored = int(len(their_final) * recipe.scored_share)
        scored = torch.randperm(len(their_final), device=theirs.device)[:num_scored]
        their_logprobs = F.log_softmax(teacher.lm_head(their_final[scored]), dim=-1)
    ours = run_layers(list(sibling.layers.values()), theirs[0], rope_of(teacher, theirs[0]))
    our_final = teacher.model.norm(ours[-1]).flatten(0, 1)
    our_logprobs = F.log_softmax(teacher.lm_head(our_final[scored]), dim=-1)
    kl = F.kl_div(our_logprobs, their_logprobs, log_target=True, reduction="batchmean")
    final = (our_final - their_final).square().mean() / their_final.var()
    between = list(zip(ours[:-1], theirs[1:-1], strict=True))
    hidden_loss = sum(distance(state, wanted) for state, wanted in between) / max(1, len(between))
    loss = kl + recipe.final_weight * final + recipe.hidden_weight * hidden_loss
    return loss, kl.detach()


def rope_of(teacher: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for the positions of hidden states (B, T, C)."""
    cos, sin = teacher.model.rotary_emb(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
    return cos, sin


class Lessons:
    """The windows of a run and what the teacher made of them, kept in float16 from the first pass for the next."""

    def __init__(self, teacher: Any, recipe: HealRecipe, windows: Sequence[Tensor], num_steps: int):
        num_windows = -(-num_steps // recipe.passes) * recipe.batch
        self._teacher, self._recipe = teacher, recipe
        self._windows = windows[: max(num_windows, recipe.batch)]
        self._kept: dict[int, Tensor] = {}

    def at(self, step: int) -> Tensor:
        """(S, B, T, C), on the teacher's device."""
        first, batch = step * self._recipe.batch, self._recipe.batch
        return torch.stack([self._of(i % len(self._windows)) for i in range(first, first + batch)], dim=1)

    def _of(self, window: int) -> Tensor:
        kept = self._kept.get(window)
        if kept is None:
            tokens = self._windows[window][None].to(self._teacher.device)
            kept = lesson(self._teacher, self._recipe, tokens)[:, 0].half()
            if self._recipe.passes > 1:
                self._kept[window] = kept.cpu()
        return kept.to(self._teacher.device, torch.float32)


def saved(folder: Path, recipe: HealRecipe) -> dict[str, Any] | None:
    """What a run of this recipe left in its folder, None if nothing; its tensors are read when they are used. Raises
    `ValueError` where another's did."""
    path = folder / STATE
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    if state["recipe"] != repr(recipe):
        raise ValueError(f"{path} was written by another recipe: {state['recipe']}; this one is {recipe!r}")
    return state


class Progress:
    """Tells every ten steps how far a run has come that began with step `first`: its KL, smoothed, and how long yet."""

    def __init__(self, log: Callable[[str], None], first: int, num_steps: int, step_tokens: int):
        self._log = log
        self._first = first
        self._num_steps = num_steps
        self._step_tokens = step_tokens
        self._started = time.monotonic()
        self._kl: float | None = None

    def note(self, step: int, kl: float) -> None:
        """`step` steps have been made."""
        self._kl = kl if self._kl is None else 0.95 * self._kl + 0.05 * kl
        if step % 10 and step != self._num_steps:
            return
        rate = (step - self._first) * self._step_tokens / (time.monotonic() - self._started)
        left_s = (self._num_steps - step) * self._step_tokens / rate
        self._log(f"step {step}/{self._num_steps}  KL {self._kl:.3f}  {rate:.0f} tokens/s  {left_s / 60:.0f} min left")


@dataclass
class HealRun:
    """A training run that can be stopped at any step and taken up again from `folder`.

    `folder` holds `state.pt` (everything needed to go on; read with `weights_only`) and `adapters.safetensors` (the
    result so far). Documents are taken in order, so a run resumed at step s sees what it would have seen. `start`
    names adapters that a new run begins from.
    """

    teacher: Any
    recipe: HealRecipe
    folder: Path
    log: Callable[[str], None]
    start: Path | None = None
    stop: Callable[[], bool] = lambda: False
    checkpoint_every_s: float = 600.0

    def train(self, documents: Sequence[Tensor], num_tokens: int) -> Path:
        """Train until `num_tokens` tokens were seen, or until `stop()` after some step. Returns the adapters' path."""
        windows, num_steps = self._windows(documents), num_tokens // self.recipe.step_tokens
        sibling = Sibling(self.teacher.requires_grad_(False), self.recipe).to(self.teacher.device)
        optimizer = torch.optim.AdamW(sibling.trainable, betas=(0.9, 0.99), weight_decay=0.0)
        lessons = Lessons(self.teacher, self.recipe, windows, num_steps)
        step, saved_at = self._resume(sibling, optimizer), time.monotonic()
        progress = Progress(self.log, step, num_steps, self.recipe.step_tokens)
        while step < num_steps and not self.stop():
            rate = self.recipe.learning_rate_at(step, num_steps)
            kl = self._learn(sibling, optimizer, rate, lessons.at(step), seed=self.recipe.seed + step)
            step += 1
            progress.note(step, kl)
            if time.monotonic() - saved_at > self.checkpoint_every_s:
                self._save(sibling, optimizer, step)
                saved_at = time.monotonic()
        return self._save(sibling, optimizer, step)

    def _windows(self, documents: Sequence[Tensor]) -> list[Tensor]:
        size, batch = self.recipe.sequence, self.recipe.batch
        windows = [document[:size].long() for document in documents if len(document) >= size]
        if len(windows) < batch:
            raise ValueError(f"{len(windows)} documents of {size} tokens or more; a batch needs {batch}")
        return windows

    def _learn(
        self, sibling: Sibling, optimizer: torch.optim.Optimizer, rate: float, theirs: Tensor, *, seed: int
    ) -> float:
        """One step. The KL of its batch, in nats a token."""
        torch.manual_seed(seed)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, kl = distillation_loss(self.teacher, sibling, self.recipe, theirs)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(sibling.trainable, 1.0)
        optimizer.step()
        return kl.item()

    def _resume(self, sibling: Sibling, optimizer: torch.optim.Optimizer) -> int:
        state = saved(self.folder, self.recipe)
        if state is None:
            if self.start:
                lowrank.load_into(self.start, sibling.layers)
            return 0
        sibling.load_state_dict(state["adapters"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        self.log(f"resumed at step {state['step']}")
        return int(state["step"])

    def _save(self, sibling: Sibling, optimizer: torch.optim.Optimizer, step: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        trained = {name: p.detach() for name, p in sibling.named_parameters() if p.requires_grad}
        state = {
            "recipe": repr(self.recipe),
            "step": step,
            "adapters": trained,
            "optimizer": optimizer.state_dict(),
        }
        scratch = self.folder / "state.partial"
        torch.save(state, scratch)
        scratch.replace(self.folder / STATE)
        result = self.folder / "adapters.safetensors"
        num_tokens = str(step * self.recipe.step_tokens)
        metadata = {"kept": ",".join(map(str, self.recipe.kept)), "num_tokens": num_tokens}
        lowrank.save(result, sibling.layers, metadata)
        return result
