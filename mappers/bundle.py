"""A mapper on disk: a folder with `manifest.json` and `weights.safetensors`, digested whole, written atomically.

Once it has been judged, `report.html` may stand beside them: its evaluation to look at, which no map needs.
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
    """The mapper in folder `path`, its digests verified. Raises `BundleCorrupt`."""
    path = Path(path)
    manifest = load_manifest(path)
    return Mapper(manifest, _load_weights(path, manifest), device)


def verify(path: str | Path) -> Mapper:
    """The mapper, everything that stands with it verified: its report as well. Raises `BundleCorrupt`."""
    mapper = load(path)
    if wanted := mapper.manifest.report_sha256:
        _read_verified(Path(path) / REPORT, wanted)
    return mapper


def load_manifest(path: str | Path) -> Manifest:
    """Only what a bundle says about itself; verifies the manifest, not the weights. Raises `BundleCorrupt`."""
    path = Path(path) / MANIFEST
    try:
        raw: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise BundleCorrupt(f"no bundle at {path.parent}: {error.strerror}") from error
    except ValueError as error:
        raise BundleCorrupt(f"{path} is not JSON") from error
    if not isinstance(raw, dict) or raw.get("format_version") != FORMAT_VERSION:
        found = raw.get("format_version") if isinstance(raw, dict) else None
        raise BundleCorrupt(f"{path} has format version {found!r}; this kvrelay reads {FORMAT_VERSION}")
    if raw.get("digest") != digest_of(raw):
        raise BundleCorrupt(f"{path} does not match its digest")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BundleCorrupt(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error


def seal(manifest: Manifest, weights: dict[str, Tensor], device: str = "cpu") -> Mapper:
    """A mapper whose manifest names these weights by their digest."""
    digest = hashlib.sha256(_serialised(weights)).hexdigest()
    return Mapper(manifest.model_copy(update={"weights_sha256": digest}), weights, device)


def save(mapper: Mapper, path: str | Path) -> Mapper:
    """Write the mapper to folder `path`, atomically; a bundle that stood there is replaced. Gives it as loaded back.

    A report stays with the folder that it was written to. Raises `MapperError` for a path that can't be written.
    """
    path = Path(path)
    check_replaceable(path)
    try:
        return _saved(mapper, path)
    except OSError as error:
        raise MapperError(f"cannot write bundle {path}: {error.strerror}") from error


def check_replaceable(path: Path) -> None:
    """Raise `MapperError` for a path where something stands that is no bundle."""
    if path.exists() and not (path / MANIFEST).exists():
        raise MapperError(f"{path} exists and is no bundle; allowed: a new path, or a bundle to replace")


def update(path: str | Path, *, report: str | None = None, **changes: Any) -> Manifest:
    """Replace fields of a bundle's manifest that do not change the map (`evaluation`, `gate`), atomically.

    `report` is the page of a new evaluation; that of an older one is removed. Raises `MapperError` for other fields,
    and for a folder that can't be written.
    """
    folder, manifest = Path(path), load_manifest(path)
    changed = manifest.model_copy(update=changes)
    if changed.bundle_id != manifest.bundle_id:
        raise MapperError(f"{', '.join(changes)} would make it another bundle; allowed: evaluation, gate")
    try:
        if "evaluation" in changes:
            # Whatever comes between, no evaluation stands there beside the report of another.
            _write_manifest(folder, changed.model_copy(update={"report_sha256": ""}))
            changed = changed.model_copy(update={"report_sha256": _put_report(folder, report)})
        return _write_manifest(folder, changed)
    except OSError as error:
        raise MapperError(f"cannot write to bundle {path}: {error.strerror}") from error


def _saved(mapper: Mapper, path: Path) -> Mapper:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        (scratch / WEIGHTS).write_bytes(_serialised(mapper.weights))
        sealed = seal(mapper.manifest, mapper.weights).manifest
        _write_manifest(scratch, sealed.model_copy(update={"report_sha256": ""}))
        loaded = load(scratch)
        scratch.chmod(0o755)
        _put_in_place(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return loaded


def _put_report(folder: Path, report: str | None) -> str:
    """Its SHA-256, empty for none."""
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
    """Write a file that all may read, atomically."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        scratch = Path(file.name)
        try:
            file.write(text)
            file.flush()
            scratch.chmod(0o644)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def _put_in_place(scratch: Path, path: Path) -> None:
    """Rename `scratch` to `path`: a reader finds the old bundle, or none for an instant, or the new one; no mixture."""
    if not path.exists():
        scratch.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(old / "bundle")
    scratch.rename(path)
    shutil.rmtree(old)


def _load_weights(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    weights = path / WEIGHTS
    data = _read_verified(weights, manifest.weights_sha256)
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise BundleCorrupt(f"{weights}: {error}") from error


def _read_verified(path: Path, sha256: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleCorrupt(f"cannot read {path}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleCorrupt(f"{path} does not match its digest")
    return data


def _serialised(weights: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous().cpu() for name, tensor in weights.items()})
