"""The package's face: everything it lists is there, and importing it alone costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mappers


@pytest.mark.parametrize("name", mappers.__all__)
def test_what_is_listed_is_there(name: str) -> None:
    assert getattr(mappers, name).__name__ == name
    assert name in dir(mappers)


def test_what_is_not_listed_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'mappers' has no attribute 'nonesuch'"):
        getattr(mappers, "nonesuch")  # noqa: B009


@pytest.mark.parametrize(
    "code",
    [
        "import mappers, mappers.errors",
        "from mappers import FingerprintMismatch, fingerprint, tokenizer_digest",
        # A function stays what it is when the module of the same name has been imported before it.
        "from mappers.fingerprint import fingerprint as it; from mappers import fingerprint; assert fingerprint is it",
        "import mappers.fingerprint; assert callable(mappers.fingerprint)",
    ],
)
def test_only_what_is_asked_for_is_imported(code: str) -> None:
    told = f"{code}; import sys; sys.exit(' '.join({{'torch', 'transformers'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_is_imported_by_its_name() -> None:
    from mappers import errors, methods

    assert errors is sys.modules["mappers.errors"] and methods is sys.modules["mappers.methods"]
