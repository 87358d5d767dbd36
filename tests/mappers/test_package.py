"""The public names of the package exist, and importing it alone imports nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mappers


@pytest.mark.parametrize("name", mappers.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(mappers, name).__name__ == name
    assert name in dir(mappers)


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'mappers' has no attribute 'nonesuch'"):
        getattr(mappers, "nonesuch")  # noqa: B009


@pytest.mark.parametrize(
    "code",
    [
        "import mappers, mappers.errors",
        "from mappers import FingerprintMismatch, fingerprint, tokenizer_digest",
        # The name stays the function after the module of the same name is imported.
        "from mappers.fingerprint import fingerprint as it; from mappers import fingerprint; assert fingerprint is it",
        "import mappers.fingerprint; assert callable(mappers.fingerprint)",
    ],
)
def test_imports_are_lazy(code: str) -> None:
    script = f"{code}; import sys; sys.exit(' '.join({{'torch', 'transformers'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_modules_are_importable_from_the_package() -> None:
    from mappers import errors, methods

    assert errors is sys.modules["mappers.errors"] and methods is sys.modules["mappers.methods"]
