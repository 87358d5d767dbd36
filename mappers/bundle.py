"""A mapper on disk: a folder with `manifest.json` and `weights.safetensors`, covered by digests, written atomically.

After an evaluation the folder may also contain `report.html`. Mapping does not need it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from pydantic import ValidationError
from torch import Tensor

from mappers.errors import BundleCorrupt, MapperError
from mappers.manifest import FORMAT_VERSION, Manifest, digest_of
from mappers.mapper import Mapper

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
REPORT = "report.html"


def load(path: str | Path, device: str = "cpu") -> Mapper:
    """Load the mapper in folder `path` and verify its digests. Raises `BundleCorrupt`."""
    path = Path(path)
    manifest = load_manifest(path)
    data = _read_verified(path / WEIGHTS, manifest.weights_sha256)
    try:
        weights = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise BundleCorrupt(f"{path / WEIGHTS}: {error}") from error
    return Mapper(manifest, weights, device)


def verify(path: str | Path) -> Mapper:
    """Load the mapper and verify its report as well. Raises `BundleCorrupt`."""
    mapper = load(path)
    if digest := mapper.manifest.report_sha256:
        _read_verified(Path(path) / REPORT, digest)
    return mapper


def load_manifest(path: str | Path) -> Manifest:
    """Load and verify the manifest alone, without the weights. Raises `BundleCorrupt`."""
    path = Path(path) / MANIFEST
    try:
        raw: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise BundleCorrupt(f"no bundle at {path.parent}: {error.strerror}") from error
    except ValueError as error:
        raise BundleCorrupt(f"{path} is not JSON") from error
    if not isinstance(raw, dict) or raw.get("format_version") != FORMAT_VERSION:
        found = raw.get("format_version") if isinstance(raw, dict) else None
        raise BundleCorrupt(f"{path} has format version {found!r}; supported: {FORMAT_VERSION}")
    if raw.get("digest") != digest_of(raw):
        raise BundleCorrupt(f"{path} does not match its digest")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BundleCorrupt(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error


def seal(manifest: Manifest, weights: dict[str, Tensor], device: str = "cpu") -> Mapper:
    """Return a mapper whose manifest contains the digest of these weights."""
    digest = hashlib.sha256(_serialise(weights)).hexdigest()
    return Mapper(manifest.model_copy(update={"weights_sha256": digest}), weights, device)


def save(mapper: Mapper, path: str | Path) -> Mapper:
    """Write the mapper to folder `path` atomically, replacing an existing bundle. Return it as loaded again.

    A report is not copied to a new folder. Raises `MapperError` if the path cannot be written.
    """
    path = Path(path)
    check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            (scratch / WEIGHTS).write_bytes(_serialise(mapper.weights))
            sealed = seal(mapper.manifest, mapper.weights).manifest
            _write_manifest(scratch, sealed.model_copy(update={"report_sha256": ""}))
            loaded = load(scratch)
            scratch.chmod(0o755)
            _move_into_place(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return loaded
    except OSError as error:
        raise MapperError(f"cannot write bundle {path}: {error.strerror}") from error


def check_replaceable(path: Path) -> None:
    """Raise `MapperError` if something other than a bundle exists at `path`."""
    if path.exists() and not (path / MANIFEST).exists():
        raise MapperError(f"{path} exists and is not a bundle; allowed: a new path, or a bundle to replace")


def update(path: str | Path, *, report: str | None = None, **changes: Any) -> Manifest:
    """Replace fields of a bundle's manifest that do not affect the map (`evaluation`, `gate`), atomically.

    `report` is the HTML page of a new evaluation; the page of an older one is removed. Raises `MapperError` for other
    fields, and for a folder that cannot be written.
    """
    folder, manifest = Path(path), load_manifest(path)
    changed = manifest.model_copy(update=changes)
    if changed.bundle_id != manifest.bundle_id:
        raise MapperError(f"{', '.join(changes)} would change the bundle's id; allowed: evaluation, gate")
    try:
        if "evaluation" in changes:
            # The manifest is written without a report first: an interrupt never leaves one beside another's report.
            _write_manifest(folder, changed.model_copy(update={"report_sha256": ""}))
            changed = changed.model_copy(update={"report_sha256": _put_report(folder, report)})
        return _write_manifest(folder, changed)
    except OSError as error:
        raise MapperError(f"cannot write to bundle {path}: {error.strerror}") from error


def _put_report(folder: Path, report: str | None) -> str:
    """Write or remove the report; return its SHA-256, empty without one."""
    if report is None:
        (folder / REPORT).unlink(missing_ok=True)
        return ""
    _replace(folder / REPORT, report)
    return hashlib.sha256(report.encode()).hexdigest()


def _write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    manifest = manifest.model_copy(update={"digest": digest_of(manifest.model_dump(mode="json"))})
    _replace(folder / MANIFEST, json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")
    return manifest


def _replace(path: Path, text: str) -> None:
    """Write a world-readable file atomically."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        scratch = Path(file.name)
        try:
            file.write(text)
            file.flush()
            scratch.chmod(0o644)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def _move_into_place(scratch: Path, path: Path) -> None:
    """Rename `scratch` to `path`. Readers see the old bundle, briefly none, then the new one; never a mixture."""
    if not path.exists():
        scratch.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(old / "bundle")
    scratch.rename(path)
    shutil.rmtree(old)


def _read_verified(path: Path, sha256: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleCorrupt(f"cannot read {path}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleCorrupt(f"{path} does not match its digest")
    return data


def _serialise(weights: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in weights.items()})
