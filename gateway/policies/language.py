"""The language of a text, for rules. Needs the extra `language`; imported only if a rule uses it."""

from __future__ import annotations

from functools import cache
from typing import Any

LANGUAGES = ("en", "de", "fr", "es", "it", "pt", "nl", "ko", "ja", "zh", "ru", "ar", "he", "el", "th", "hi")
MIN_CONFIDENCE = 0.3
MAX_CHARS = 1000  # the start of a text is enough, and takes 0.2 ms


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=MIN_CONFIDENCE)
    identifier.set_languages(LANGUAGES)
    return identifier


def load() -> None:
    """Load the model. Raises `ValueError` if the extra is not installed."""
    try:
        _identifier()
    except ImportError as error:
        raise ValueError(f"requires the extra `language`: pip install 'kvrelay[language]' ({error})") from error


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of the text's language; None if none is likely enough."""
    language, _ = _identifier().classify(text[:MAX_CHARS])
    return language if language in LANGUAGES else None
