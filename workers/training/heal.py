"""Make a small sibling of a model: leave layers out, then heal the rest by distillation.

The lower layers, up to the first one that is adapted or follows the cut, stay the teacher's own: one forward pass
serves both models up to there, and their keys and values pass between the two unchanged. The adapters above learn to
give the teacher's next-token distribution (KL on a random share of the positions), its last hidden state, and its
hidden states between.

    teacher   0 ── 1 ── ... ── 17 ── 18 ── ... ── 23 ── 24  ── ... ── 29  ── head
                               │         hidden states match, then the distribution
    sibling       (shared)     └─────────────────────── 24' ── ... ── 29' ── head

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

from workers.training import lowrank


@dataclass(frozen=True)
class HealRecipe:
    """What to keep and how to train. `kept` and `adapted` are layer numbers of the teacher."""

    kept: tuple[int, ...]
    adapted: tuple[int, ...]
    rank: int = 48
    sequence: int = 512
    batch: int = 1
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
        for index in range(recipe.num_shared, len(recipe.kept)):
            layer = copy.deepcopy(teacher.model.layers[recipe.kept[index]]).requires_grad_(False)
            if recipe.kept[index] in recipe.adapted:
                lowrank.attach(layer, recipe.rank, generator)
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


def distillation_loss(teacher: Any, sibling: Sibling, recipe: HealRecipe, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, KL in nats a token) of one batch of token ids (B, T)."""
    with torch.no_grad():
        hidden = teacher.model.embed_tokens(tokens)
        rope = teacher.model.rotary_emb(hidden, torch.arange(tokens.shape[1], device=tokens.device)[None])
        theirs = run_layers(list(teacher.model.layers), hidden, rope)  # L x (B, T, C)
        their_final = teacher.model.norm(theirs[-1]).flatten(0, 1)  # (B*T, C)
        scored = torch.randperm(len(their_final), device=tokens.device)[: int(len(their_final) * recipe.scored_share)]
        their_logprobs = F.log_softmax(teacher.lm_head(their_final[scored]), dim=-1)
        shared = theirs[recipe.num_shared - 1] if recipe.num_shared else hidden
    ours = run_layers(list(sibling.layers.values()), shared, rope)
    our_final = teacher.model.norm(ours[-1]).flatten(0, 1)
    our_logprobs = F.log_softmax(teacher.lm_head(our_final[scored]), dim=-1)
    kl = F.kl_div(our_logprobs, their_logprobs, log_target=True, reduction="batchmean")
    final = (our_final - their_final).square().mean() / their_final.var()
    between = list(zip(ours[:-1], recipe.kept[recipe.num_shared :], strict=False))
    hidden_loss = sum(distance(state, theirs[layer]) for state, layer in between) / max(1, len(between))
    loss = kl + recipe.final_weight * final + recipe.hidden_weight * hidden_loss
    return loss, kl.detach()


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
        windows = [d[: self.recipe.sequence].long() for d in documents if len(d) >= self.recipe.sequence]
        num_steps = num_tokens // (self.recipe.batch * self.recipe.sequence)
        if len(windows) < self.recipe.batch:
            raise ValueError(
                f"{len(windows)} documents of {self.recipe.sequence} tokens or more; "
                f"a batch needs {self.recipe.batch}"
            )
        sibling = Sibling(self.teacher.requires_grad_(False), self.recipe).to(self.teacher.device)
        optimizer = torch.optim.AdamW(sibling.trainable, betas=(0.9, 0.99), weight_decay=0.0)
        step = self._resume(sibling, optimizer)
        started = saved = time.monotonic()
        first, average = step, None
        while step < num_steps and not self.stop():
            torch.manual_seed(self.recipe.seed + step)
            batch = self._batch(windows, step).to(self.teacher.device)  # (B, T)
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.learning_rate_at(step, num_steps)
            loss, kl = distillation_loss(self.teacher, sibling, self.recipe, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(sibling.trainable, 1.0)
            optimizer.step()
            step += 1
            average = kl.item() if average is None else 0.95 * average + 0.05 * kl.item()
            if step % 10 == 0 or step == num_steps:
                rate = (step - first) * batch.numel() / (time.monotonic() - started)
                left = (num_steps - step) * batch.numel() / rate
                self.log(f"step {step}/{num_steps}  KL {average:.3f}  {rate:.0f} tokens/s  {left / 60:.0f} min left")
            if time.monotonic() - saved > self.checkpoint_every_s:
                self._save(sibling, optimizer, step)
                saved = time.monotonic()
        return self._save(sibling, optimizer, step)

    def _batch(self, windows: Sequence[Tensor], step: int) -> Tensor:
        first = step * self.recipe.batch
        return torch.stack([windows[i % len(windows)] for i in range(first, first + self.recipe.batch)])

    def _resume(self, sibling: Sibling, optimizer: torch.optim.Optimizer) -> int:
        path = self.folder / "state.pt"
        if not path.exists():
            if self.start:
                lowrank.load_into(self.start, sibling.layers)
            return 0
        state = torch.load(path, weights_only=True)
        if state["recipe"] != repr(self.recipe):
            raise ValueError(f"{path} was written by another recipe: {state['recipe']}; this one is {self.recipe!r}")
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
        scratch.replace(self.folder / "state.pt")
        result = self.folder / "adapters.safetensors"
        num_tokens = step * self.recipe.batch * self.recipe.sequence
        metadata = {"kept": ",".join(map(str, self.recipe.kept)), "num_tokens": str(num_tokens)}
        lowrank.save(result, sibling.layers, metadata)
        return result
