"""Documents of a given length in tokens, each new to every cache: what the bench reads."""

from __future__ import annotations

import random
from typing import Any

import httpx

from workers.api.schemas import SECRET_HEADER

SUBJECTS = "harbour ledger bridge orchard lantern chapel granary ferry quarry archive stable tower cellar mill".split()
VERBS = "was repaired,was sold,was painted,was counted,was closed,was opened,was moved,was measured".split(",")
PLACES = "by the north quay,near the old market,behind the school,on the hill,below the weir,in the yard".split(",")
PEOPLE = "the warden,a clerk,two masons,the council,an apprentice,the ferryman,a surveyor,the widow Brandt".split(",")


class Documents:
    """Makes documents with the help of a worker's tokenizer."""

    def __init__(self, worker_url: str, secret: str):
        self._http = httpx.Client(base_url=worker_url, headers={SECRET_HEADER: secret}, timeout=60, trust_env=False)

    def of_length(self, num_tokens: int, name: str) -> str:
        """A document of at most `num_tokens` tokens, and of at least 40 fewer; the same for the same name."""
        entries = list(_entries(random.Random(name), num_tokens))
        low, high = 1, len(entries)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._tokenize({"prefix": _joined(name, entries[:middle])})["num_tokens"] <= num_tokens
            low, high = (middle, high) if fits else (low, middle)
        return _joined(name, entries[:low])

    def token_ids(self, document: str, question: str) -> list[int]:
        messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
        ids: list[int] = self._tokenize({"messages": messages})["token_ids"]
        return ids

    def _tokenize(self, prompt: dict[str, Any]) -> dict[str, Any]:
        reply = self._http.post("/v1/tokenize", json=prompt)
        reply.raise_for_status()
        body: dict[str, Any] = reply.json()
        return body


def _entries(rng: random.Random, num_tokens: int) -> list[str]:
    """More than enough entries: each has at least ten tokens."""
    return [
        f"Entry {number}: in {rng.randint(1790, 1930)} the {rng.choice(SUBJECTS)} {rng.choice(VERBS)} "
        f"{rng.choice(PLACES)} by {rng.choice(PEOPLE)}, at a cost of {rng.randint(2, 980)} crowns."
        for number in range(1, num_tokens // 10 + 2)
    ]


def _joined(name: str, entries: list[str]) -> str:
    return f"Register {name}. " + " ".join(entries)
