"""Which language a text is written in, roughly and at once: by its script, or by the small words of a language."""

from __future__ import annotations

import re

# Where two share characters, the one that only one of them uses comes first.
SCRIPTS = {
    "ko": r"[\uac00-\ud7af]",
    "ja": r"[\u3040-\u30ff]",
    "zh": r"[\u4e00-\u9fff]",
    "ru": r"[\u0400-\u04ff]",
    "ar": r"[\u0600-\u06ff]",
    "he": r"[\u0590-\u05ff]",
    "el": r"[\u0370-\u03ff]",
    "th": r"[\u0e00-\u0e7f]",
    "hi": r"[\u0900-\u097f]",
}
SMALL_WORDS = {
    "en": "the and is are was of to in that what which how why who does did can you it this with for from",
    "de": "der die das und ist sind war nicht ein eine wie warum wer welche kann ich wir sie mit für von auf zu",
    "fr": "le la les et est sont des une un dans que qui pourquoi comment quel quelle avec pour ce cette je nous vous",
    "es": "el los las y es son de una un en que por qué cómo cuál quién con para este esta yo usted no se",
    "it": "il lo gli e è sono di una un in che perché come quale chi con per questo questa io non si della",
    "pt": "o os as e é são de uma um em que por como qual quem com para este esta eu não se você da do",
    "nl": "de het en is zijn van een in dat wat waarom hoe wie welke met voor dit deze ik niet je op te",
}
LANGUAGES = (*SMALL_WORDS, *SCRIPTS)

_SMALL_WORDS = {language: frozenset(words.split()) for language, words in SMALL_WORDS.items()}
_SCRIPTS = {language: re.compile(characters) for language, characters in SCRIPTS.items()}


def language_of(text: str) -> str | None:
    """Its ISO 639-1 code; None where nothing speaks for one language more than for any other."""
    letters = sum(character.isalpha() for character in text)
    for language, characters in _SCRIPTS.items():
        if len(characters.findall(text)) * 8 > letters:
            return language
    words = re.findall(r"\w+", text.lower())
    hits = {language: sum(word in known for word in words) for language, known in _SMALL_WORDS.items()}
    first, second = sorted(hits.values(), reverse=True)[:2]
    return max(hits, key=lambda language: hits[language]) if first > second else None
