"""Make a small sibling of a model: remove layers, then heal the rest by distillation.

The lower layers, up to the first that is adapted or follows a removed one, stay the teacher's own: one forward pass
serves both models up to there, and their keys and values pass between the two unchanged. The adapters above learn the
teacher's next-token distribution (KL on a random share of the positions), its last hidden state, and the input that the
teacher gives to each kept layer: a layer learns to do the work of the removed layers behind it.

    teacher   0 ── ... ── 19 ── 20  ── 21 ── 22 ── 23  ── 24 ── 25 ── 26  ── ... ── 29  ── head
                          │                   hidden states match here │    then the distribution
    sibling    (shared)   └──── 20' ────────────── 23' ────────────── 26' ───────── 29' ── head

The first layer of the sibling's own has the same input as the teacher's, so its key and value projections stay the
teacher's too.

Knows neither mappers nor workers. Source of the idea: Minitron, https://arxiv.org/abs/2407.14679.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

STATE = "state.pt"  # in a run's folder


@dataclass(frozen=True)
class HealRecipe:
    """What to keep and how to train. `kept` and `adapted` are layer numbers of the teacher. The sibling trains `passes`
    times on each document, the teacher runs once."""

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
            raise ValueError(f"kept layers must be in increasing order: {self.kept}")
        if not set(self.adapted) <= set(self.kept):
            raise ValueError(f"adapted layers {sorted(set(self.adapted) - set(self.kept))} are not kept")

    @property
    def num_shared(self) -> int:
        """The number of first layers that both models share: neither moved nor adapted."""
        changed = (i for i, layer in enumerate(self.kept) if layer != i or layer in self.adapted)
        return next(changed, len(self.kept))

    @property
    def own(self) -> tuple[int, ...]:
        """The kept layers that the sibling does not share with the teacher."""
        return self.kept[self.num_shared :]

    @property
    def frozen(self) -> tuple[str, ...]:
        """The projections of the first own layer that need no adapter, because its input is the teacher's."""
        return ("k_proj", "v_proj") if self.own[:1] == (self.num_shared,) else ()

    @property
    def step_tokens(self) -> int:
        return self.batch * self.sequence

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Warm up, hold, then fall linearly to a twentieth over the last `decay_share` of the steps."""
        decay_steps = max(1, int(num_steps * self.decay_share))
        left = (num_steps - step) / decay_steps
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * max(0.05, min(1.0, left))


# Adapters


class LowRankAdapter(nn.Module):
    """`linear(x) + B A x` with a frozen `linear`. A is random, B zero: training starts at the pruned model.

    Source: LoRA, https://arxiv.org/abs/2106.09685.
    """

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator):
        super().__init__()
        self.linear = linear
        out_features, in_features = linear.weight.shape
        self.A = nn.Parameter(torch.randn(rank, in_features, generator=generator) / math.sqrt(in_features))
        self.B = nn.Parameter(torch.zeros(out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x @ self.A.T) @ self.B.T  # type: ignore[no-any-return]


def attach_adapters(layer: nn.Module, rank: int, generator: torch.Generator, frozen: Sequence[str] = ()) -> None:
    """Put an adapter on every linear map of the layer whose name is not in `frozen`."""
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, LowRankAdapter) and name not in frozen:
                setattr(parent, name, LowRankAdapter(child, rank, generator))


def adapter_parameters(layers: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each adapter's A and B, named by its linear map, as in `5.self_attn.q_proj.A`."""
    for name, module in layers.named_modules():
        if isinstance(module, LowRankAdapter):
            yield f"{name}.A", module.A
            yield f"{name}.B", module.B


def save_adapters(path: Path, layers: nn.Module, metadata: dict[str, str]) -> None:
    """Write the adapters in float16, atomically."""
    tensors = {name: parameter.detach().half().contiguous() for name, parameter in adapter_parameters(layers)}
    scratch = path.with_suffix(".partial")
    save_file(tensors, scratch, metadata=metadata)
    scratch.replace(path)


@torch.no_grad()
def load_adapters(path: Path, layers: nn.Module) -> None:
    """Set the adapters of `layers` from a file. Raises `ValueError` for a file of other layers."""
    with safe_open(path, framework="pt") as file:
        wanted = dict(adapter_parameters(layers))
        if wanted.keys() != set(file.keys()):
            raise ValueError(f"{path} holds {len(file.keys()) // 2} adapters of other layers")
        for name, parameter in wanted.items():
            parameter.copy_(file.get_tensor(name))


# Models


class Sibling(nn.Module):
    """The layers above the shared ones. The teacher provides everything else."""

    def __init__(self, teacher: Any, recipe: HealRecipe):
        super().__init__()
        generator = torch.Generator().manual_seed(recipe.seed)
        self.layers = nn.ModuleDict()
        for index, kept in enumerate(recipe.own, start=recipe.num_shared):
            layer = copy.deepcopy(teacher.model.layers[kept]).requires_grad_(False)
            if kept in recipe.adapted:
                attach_adapters(layer, recipe.rank, generator, recipe.frozen if kept == recipe.own[0] else ())
            self.layers[str(index)] = layer

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


def run_layers(teacher: Any, layers: Sequence[nn.Module], hidden: Tensor) -> list[Tensor]:
    """Return the hidden state after each layer, (B, T, C) each, with the teacher's rotary embedding and causal
    attention."""
    rope = teacher.model.rotary_emb(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
    states = []
    for layer in layers:
        hidden = layer(hidden, position_embeddings=rope, attention_mask=None)
        states.append(hidden)
    return states


@torch.no_grad()
def teacher_states(teacher: Any, recipe: HealRecipe, tokens: Tensor) -> Tensor:
    """Return the teacher's hidden states for token ids (B, T): before each own layer of the sibling, and after the
    teacher's last. (S, B, T, C) for S - 1 own layers."""
    hidden = teacher.model.embed_tokens(tokens)
    states = [hidden, *run_layers(teacher, list(teacher.model.layers), hidden)]
    return torch.stack([states[layer] for layer in (recipe.num_shared, *recipe.own[1:], len(states) - 1)])


def distillation_loss(teacher: Any, sibling: Sibling, recipe: HealRecipe, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss, KL in nats per token) of one batch, given as its `teacher_states`."""
    with torch.no_grad():
        their_final = teacher.model.norm(theirs[-1]).flatten(0, 1)  # (B*T, C)
        num_scored = int(len(their_final) * recipe.scored_share)
        scored = torch.randperm(len(their_final), device=theirs.device)[:num_scored]
        their_logprobs = F.log_softmax(teacher.lm_head(their_final[scored]), dim=-1)
    ours = run_layers(teacher, list(sibling.layers.values()), theirs[0])
    our_final = teacher.model.norm(ours[-1]).flatten(0, 1)
    our_logprobs = F.log_softmax(teacher.lm_head(our_final[scored]), dim=-1)
    kl = F.kl_div(our_logprobs, their_logprobs, log_target=True, reduction="batchmean")
    final = (our_final - their_final).square().mean() / their_final.var()
    between = list(zip(ours[:-1], theirs[1:-1], strict=True))
    hidden_loss = sum(_relative_error(state, wanted) for state, wanted in between) / max(1, len(between))
    loss = kl + recipe.final_weight * final + recipe.hidden_weight * hidden_loss
    return loss, kl.detach()


def _relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the mean squared error as a share of the variance over tokens, without the first tokens (attention
    sinks)."""
    ours, theirs = ours[:, 4:], theirs[:, 4:]
    return (ours - theirs).square().mean() / (theirs - theirs.mean(1, keepdim=True)).square().mean()


# Training


class TeacherCache:
    """The windows of a run with their teacher states, kept in float16 for later passes."""

    def __init__(self, teacher: Any, recipe: HealRecipe, windows: Sequence[Tensor], num_steps: int):
        num_windows = -(-num_steps // recipe.passes) * recipe.batch
        self._teacher, self._recipe = teacher, recipe
        self._windows = windows[: max(num_windows, recipe.batch)]
        self._states: dict[int, Tensor] = {}

    def batch(self, step: int) -> Tensor:
        """Return the teacher states of a step, (S, B, T, C), on the teacher's device."""
        first, size = step * self._recipe.batch, self._recipe.batch
        return torch.stack([self._window(i % len(self._windows)) for i in range(first, first + size)], dim=1)

    def _window(self, index: int) -> Tensor:
        states = self._states.get(index)
        if states is None:
            tokens = self._windows[index][None].to(self._teacher.device)
            states = teacher_states(self._teacher, self._recipe, tokens)[:, 0].half()
            if self._recipe.passes > 1:
                self._states[index] = states.cpu()
        return states.to(self._teacher.device, torch.float32)


def load_state(folder: Path, recipe: HealRecipe) -> dict[str, Any] | None:
    """Return the saved state of a run, None if there is none; its tensors are memory-mapped. Raises `ValueError` for
    the state of another recipe."""
    path = folder / STATE
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    if state["recipe"] != repr(recipe):
        raise ValueError(f"{path} was written by another recipe: {state['recipe']}; this one is {recipe!r}")
    return state


class ProgressLog:
    """Logs every ten steps the smoothed KL, the rate and the time left. The run began with step `first`."""

    def __init__(self, log: Callable[[str], None], first: int, num_steps: int, step_tokens: int):
        self._log = log
        self._first = first
        self._num_steps = num_steps
        self._step_tokens = step_tokens
        self._started = time.monotonic()
        self._kl: float | None = None

    def add(self, step: int, kl: float) -> None:
        """Record that `step` steps are done."""
        self._kl = kl if self._kl is None else 0.95 * self._kl + 0.05 * kl
        if step % 10 and step != self._num_steps:
            return
        rate = (step - self._first) * self._step_tokens / (time.monotonic() - self._started)
        left_s = (self._num_steps - step) * self._step_tokens / rate
        self._log(f"step {step}/{self._num_steps}  KL {self._kl:.3f}  {rate:.0f} tokens/s  {left_s / 60:.0f} min left")


@dataclass
class HealRun:
    """A training run that can be stopped at any step and resumed from `folder`.

    `folder` holds `state.pt` (everything needed to resume; loaded with `weights_only`) and `adapters.safetensors` (the
    result so far). Documents are used in order, so a run resumed at step s trains on what it would have. `start` names
    adapters from which a new run begins.
    """

    teacher: Any
    recipe: HealRecipe
    folder: Path
    log: Callable[[str], None]
    start: Path | None = None
    stop: Callable[[], bool] = lambda: False
    checkpoint_every_s: float = 600.0

    def train(self, documents: Sequence[Tensor], num_tokens: int) -> Path:
        """Train on `num_tokens` tokens, or until `stop()` after some step. Returns the adapters' path. Raises
        `ValueError` for documents that are too short or a folder of another recipe."""
        size, num_steps = self.recipe.sequence, num_tokens // self.recipe.step_tokens
        windows = [document[:size].long() for document in documents if len(document) >= size]
        if len(windows) < self.recipe.batch:
            count = f"{len(windows)} documents of {size} tokens or more"
            raise ValueError(f"{count}; a batch needs {self.recipe.batch}")
        sibling = Sibling(self.teacher.requires_grad_(False), self.recipe).to(self.teacher.device)
        optimizer = torch.optim.AdamW(sibling.trainable, betas=(0.9, 0.99), weight_decay=0.0)
        cache = TeacherCache(self.teacher, self.recipe, windows, num_steps)
        step, saved_at = self._resume(sibling, optimizer), time.monotonic()
        progress = ProgressLog(self.log, step, num_steps, self.recipe.step_tokens)
        while step < num_steps and not self.stop():
            kl = self._train_step(sibling, optimizer, step, num_steps, cache.batch(step))
            step += 1
            progress.add(step, kl)
            if time.monotonic() - saved_at > self.checkpoint_every_s:
                self._save(sibling, optimizer, step)
                saved_at = time.monotonic()
        return self._save(sibling, optimizer, step)

    def _train_step(
        self, sibling: Sibling, optimizer: torch.optim.Optimizer, step: int, num_steps: int, theirs: Tensor
    ) -> float:
        """Return the KL of the batch, in nats per token."""
        torch.manual_seed(self.recipe.seed + step)
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_at(step, num_steps)
        loss, kl = distillation_loss(self.teacher, sibling, self.recipe, theirs)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(sibling.trainable, 1.0)
        optimizer.step()
        return kl.item()

    def _resume(self, sibling: Sibling, optimizer: torch.optim.Optimizer) -> int:
        state = load_state(self.folder, self.recipe)
        if state is None:
            if self.start:
                load_adapters(self.start, sibling.layers)
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
        save_adapters(result, sibling.layers, metadata)
        return result
