"""Model folders built on the user's machine: built atomically and once per recipe fingerprint."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from workers.families import build_once, is_built, recipe_fingerprint


def write_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def test_finished_folder_is_not_built_again(tmp_path: Path) -> None:
    fingerprint = recipe_fingerprint("a")
    build_once(tmp_path / "model", fingerprint, write_weights)
    assert is_built(tmp_path / "model", fingerprint)

    def fail(_: Path) -> None:
        raise AssertionError("built again")

    build_once(tmp_path / "model", fingerprint, fail)


def test_another_recipe_replaces_the_folder(tmp_path: Path) -> None:
    build_once(tmp_path / "model", recipe_fingerprint("a"), write_weights)
    build_once(tmp_path / "model", recipe_fingerprint("b"), write_weights)
    assert is_built(tmp_path / "model", recipe_fingerprint("b"))
    assert not is_built(tmp_path / "model", recipe_fingerprint("a"))


def test_failed_build_keeps_the_old_folder_and_no_scratch(tmp_path: Path) -> None:
    fingerprint = recipe_fingerprint("a")
    build_once(tmp_path / "model", fingerprint, write_weights)

    def fail(folder: Path) -> None:
        write_weights(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", recipe_fingerprint("b"), fail)
    assert is_built(tmp_path / "model", fingerprint)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


def test_concurrent_callers_build_once(tmp_path: Path) -> None:
    built, fingerprint = [], recipe_fingerprint("a")

    def build(folder: Path) -> None:
        built.append(folder)
        write_weights(folder)

    threads = [threading.Thread(target=build_once, args=(tmp_path / "model", fingerprint, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_fingerprint_depends_on_every_part() -> None:
    assert recipe_fingerprint("a", "b") != recipe_fingerprint("a", "c") != recipe_fingerprint("ab", "c")
    assert recipe_fingerprint("ab", "c") != recipe_fingerprint("a", "bc")
