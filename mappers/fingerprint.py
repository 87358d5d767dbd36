"""Fingerprints: which weights and which tokenizer a model folder contains.

A published model is identified by its content: SHA-256 over its tensors and the config fields that affect its KV cache.
A derived model is computed on the user's machine, where the last bits depend on the processor. It is identified by its
recipe: its folder has a `kvrelay.json` with `{"fingerprint": ..., "output_digest": ...}`. The output digest, SHA-256 of
its `model.safetensors`, only detects later changes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from mappers.errors import FingerprintMismatch, UnsupportedModel

RECIPE_FILE = "kvrelay.json"
VOCABULARIES = (("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))  # older than tokenizer.json
CONFIG_FIELDS = """
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim layer_types
    sliding_window max_position_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor
    rms_norm_eps layer_norm_eps hidden_act attention_bias tie_word_embeddings
""".split()
# Fields added later are hashed only if a config has them, so that models without them keep their fingerprints.
LATER_FIELDS = """
    alibi attention_multiplier attn_logit_softcapping clip_qkv embedding_multiplier final_logit_softcapping
    hidden_activation kv_lora_rank layer_norm_epsilon logit_scale logits_scaling max_window_layers no_rope_layers
    norm_topk_prob num_experts_per_tok num_kv_shared_layers original_max_position_embeddings qk_layernorm
    quantization_config query_pre_attn_scalar residual_multiplier rope_local_base_freq rotary_emb_base rotary_pct
    sliding_window_pattern use_parallel_residual use_qk_norm use_qkv_bias use_sliding_window v_head_dim
""".split()


def fingerprint(folder: str | Path, cache_folder: Path | None = None) -> str:
    """Return the fingerprint of the model in `folder`, SHA-256 in hex.

    Raises `UnsupportedModel` without safetensors or config, `FingerprintMismatch` if a derived model has changed since
    its recipe wrote it.
    """
    folder = Path(folder)
    recipe = folder / RECIPE_FILE
    if not recipe.exists():
        return content_digest(folder, cache_folder)
    record = _json(recipe)
    missing = [name for name in ("fingerprint", "output_digest") if not isinstance(record.get(name), str)]
    if missing:
        raise UnsupportedModel(f"{recipe} has no {missing[0]!r}")
    if record["output_digest"] != _output_digest(folder, cache_folder):
        raise FingerprintMismatch(f"{folder} has changed since it was prepared: remove it and prepare it again")
    return str(record["fingerprint"])


def content_digest(folder: str | Path, cache_folder: Path | None = None) -> str:
    """Return SHA-256 over names, dtypes, shapes and bytes of all tensors, sharded or not, and relevant config fields.

    Cached by the files' sizes and times, so that a second call reads no weights.
    """
    folder = Path(folder)
    config = folder / "config.json"
    weights = sorted(folder.glob("*.safetensors"))
    if not weights or not config.exists():
        raise UnsupportedModel(f"{folder} is not a model folder: it needs config.json and *.safetensors")
    return _cached("content 2", folder, [config, *weights], cache_folder, lambda: _content_digest(config, weights))


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the Hugging Face config of a model folder as JSON values."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise UnsupportedModel(f"{folder} is not a model folder: it has no config.json")
    return _json(path)


def tokenizer_digest(folder: str | Path) -> str | None:
    """Return SHA-256 over the tokenizer's vocabulary, rules and chat template, None without a tokenizer."""
    folder = Path(folder)
    vocabularies = _vocabularies(folder)
    if not vocabularies:
        return None
    return _sha256(next(iter(vocabularies.values())), _chat_template(folder).encode())


def same_vocabulary(one: str | Path, other: str | Path) -> bool:
    """Return whether the tokenizers of two folders give the same token ids, judged by their files.

    Compares the first file format that both have. Without a common one they are assumed to be the same.
    """
    first, second = _vocabularies(Path(one)), _vocabularies(Path(other))
    return next((first[form] == second[form] for form in first if form in second), True)


def default_cache_folder() -> Path:
    """Return `KVRELAY_HOME`, or `kvrelay` in the user's cache folder."""
    home = os.environ.get("KVRELAY_HOME")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def _output_digest(folder: Path, cache_folder: Path | None) -> str | None:
    weights = folder / "model.safetensors"
    if not weights.exists():
        return None
    return _cached("output", folder, [weights], cache_folder, lambda: file_digest(weights))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_digest(config: Path, weights: list[Path]) -> str:
    fields = _json(config)
    hashed = {name: fields.get(name) for name in CONFIG_FIELDS}
    hashed |= {name: fields[name] for name in LATER_FIELDS if fields.get(name) is not None}
    digest = hashlib.sha256(_canonical(hashed))
    tensors = sorted((entry for path in weights for entry in _header(path)), key=lambda entry: entry.name)
    with ExitStack() as maps:
        views = {path: maps.enter_context(_mapped(path)) for path in weights}
        for entry in tensors:
            digest.update(_canonical([entry.name, entry.dtype, entry.shape]))
            with memoryview(views[entry.path]) as whole, whole[entry.begin : entry.end] as part:
                digest.update(part)
    return digest.hexdigest()


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class _Entry(NamedTuple):
    """One tensor in a safetensors file: bytes `[begin, end)`, dtype and shape."""

    name: str
    path: Path
    begin: int
    end: int
    dtype: str
    shape: list[int]


def _header(path: Path) -> list[_Entry]:
    """List the tensors of a safetensors file."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(size))
        return [
            _Entry(name, path, 8 + size + begin, 8 + size + end, item["dtype"], item["shape"])
            for name, item in entries.items()
            if name != "__metadata__"
            for begin, end in [item["data_offsets"]]
        ]
    except (struct.error, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise UnsupportedModel(f"{path} is not a safetensors file") from error


def _cached(kind: str, folder: Path, files: list[Path], cache: Path | None, compute: Callable[[], str]) -> str:
    """Return the cached digest, or compute and cache it if the files' sizes or times have changed."""
    key = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    where = hashlib.sha256(f"{kind}:{folder.resolve()}".encode()).hexdigest()[:32]
    entry = (cache or default_cache_folder()) / "digests" / f"{where}.json"
    try:
        record = json.loads(entry.read_bytes())
        if record["files"] == key:
            return str(record["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing or invalid: compute it
    digest = compute()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump({"files": key, "digest": digest}, file)
        os.replace(file.name, entry)
    except OSError:
        pass  # a read-only folder only costs the time to hash again
    return digest


def _vocabularies(folder: Path) -> dict[str, bytes]:
    """Return what determines the token ids of a text, by the file format it is stored in, most complete first."""
    found = {}
    path = folder / "tokenizer.json"
    if path.exists():
        found[path.name] = _canonical({k: v for k, v in _json(path).items() if k not in ("padding", "truncation")})
    for names in VOCABULARIES:
        if (folder / names[0]).exists():
            files = [folder / name for name in (*names, "added_tokens.json") if (folder / name).exists()]
            found[names[0]] = _canonical([[file.name, file_digest(file)] for file in files])
    return found


def _chat_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    return str(_json(settings).get("chat_template") or "") if settings.exists() else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} is not a JSON object")
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
