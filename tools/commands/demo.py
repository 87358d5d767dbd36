"""`kvrelay demo`: a short scripted conversation on a stack of its own, with the cost of each turn.

The conversation has a long system prompt, then questions, some of them with a forced escalation. Exit status 1 when a
turn fell back to a full prefill, 2 when the stack did not start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tools import family, measuring
from tools.client import chat
from tools.output import add_json_option, render, write_results

AGREEMENT_TOKENS = 16
HANDOFF_PATHS = ("mapped", "hybrid")
ESCALATE = "always_escalate"

# Each question with the policy it asks for; None leaves it to the configuration.
TURNS = (
    ("When do the reading rooms open on Saturday?", None),
    ("How long is a book lent for, and how often can the loan be renewed?", ESCALATE),
    ("What does a colour print cost?", None),
    ("A visitor found an umbrella in the hall. What happens with it?", ESCALATE),
    ("Where does everyone gather when there is a fire alarm?", ESCALATE),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvrelay demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default=family.DEFAULT_FAMILY)
    add_json_option(parser, "the table")
    options = parser.parse_args(argv)
    return measuring.run("kvrelay demo", lambda: _demo(options.family, options.json))


def _demo(name: str, file: Path | None) -> int:
    config = family.configuration(name, family.prepare(name))
    messages, turns = [{"role": "system", "content": HANDBOOK}], []
    with (
        measuring.own_stack("demo", config) as (stack, _),
        httpx.Client(base_url=stack.url, timeout=120, trust_env=False) as http,
    ):
        for number, (question, policy) in enumerate(TURNS, start=1):
            messages.append({"role": "user", "content": question})
            options = {"agreement_probe": AGREEMENT_TOKENS} | ({"policy": policy} if policy else {})
            answer = chat(http, messages, options=options)
            messages.append({"role": "assistant", "content": answer.text})
            turns.append(_row(number, answer.ttft_ms, answer.kvrelay))
            print(f"\n{number}. {question}\n   {answer.text.strip()}", flush=True)
    write_results(_table(turns), file, {"turns": turns})
    return verdict(turns)


def _row(number: int, ttft_ms: float, kvrelay: dict[str, Any]) -> dict[str, Any]:
    return {
        "turn": number,
        "tier": kvrelay.get("tier"),
        "path": kvrelay.get("path"),
        "forced": kvrelay.get("forced"),
        "prefix_tokens": kvrelay.get("mapped_tokens") or kvrelay.get("cached_tokens") or 0,
        "ttft_ms": ttft_ms,
        "handoff_ttft_ms": kvrelay.get("handoff_ttft_ms"),
        "full_prefill_ttft_ms": kvrelay.get("full_prefill_ms"),
        "top1_agreement": kvrelay.get("top1_agreement"),
    }


def _table(turns: list[dict[str, Any]]) -> str:
    head = ["turn", "tier", "path", "decided", "handed over", "TTFT ms", "handoff ms", "full prefill ms", "agreement"]
    rows = [
        [turn["turn"], turn["tier"], turn["path"], "forced" if turn["forced"] else "confidence"]
        + [turn[key] for key in list(turn)[4:]]
        for turn in turns
    ]
    return "\n" + render(head, rows)


def verdict(turns: list[dict[str, Any]]) -> int:
    """Return 0 if a turn was handed over, no turn fell back, and each handoff beat its full prefill."""
    handoffs = [turn for turn in turns if turn["path"] in HANDOFF_PATHS]
    measured = [turn for turn in handoffs if turn["handoff_ttft_ms"] and turn["full_prefill_ttft_ms"]]
    slower = [turn for turn in measured if turn["handoff_ttft_ms"] >= turn["full_prefill_ttft_ms"]]
    problems = {
        "fell back to a full prefill": [turn for turn in turns if str(turn["path"]).startswith("fallback")],
        "not measured against a full prefill": [turn for turn in handoffs if turn not in measured],
        "the handoff was no faster than a full prefill": slower,
    }
    for problem, affected in problems.items():
        if affected:
            print(f"\n{problem}: turn {', '.join(str(turn['turn']) for turn in affected)}", file=sys.stderr)
            return 1
    if not handoffs:
        print("\nno turn was handed over", file=sys.stderr)
    return 0 if handoffs else 1


HANDBOOK = """You answer questions of the staff of the Harbour Library. Answer briefly, and only from this handbook.

Opening hours. The reading rooms open at nine in the morning from Monday to Friday and close at eight in the evening. \
On Saturday they open at ten and close at four. On Sunday and on public holidays the building stays closed, except for \
the night of the museums in May, when it is open until midnight. The last call for the stacks is one hour before \
closing. Visitors who are still at a desk when the bell rings are asked twice, politely, before the lights are turned \
down. The porter locks the doors and notes the time in the green book.

Membership. Anyone who lives or works in the city may become a member. A yearly card costs twenty-four euros; pupils, \
students and people without income pay nothing. The card is made at the front desk while the member waits, against an \
identity card and a proof of address. A lost card is replaced for three euros. Cards are never lent, not even within a \
family; children under twelve get a card of their own, signed for by a parent.

Lending. Books are lent for four weeks, films and records for one week, periodicals not at all. A loan can be renewed \
twice, as long as nobody has reserved the item. Up to thirty items may be out at a time on one card, of which at most \
ten may be films. The reference collection, marked with a red dot on the spine, stays in the house. Items from the \
harbour archive are read in the archive room only, in gloves, with a pencil, and never two folders at once.

Late returns. An item that comes back late costs ten cents a day, up to the price of a paperback, which the house has \
set at nine euros. After six weeks a lost item is charged at its replacement cost plus five euros for the work. Fees \
under two euros are written off at the end of the year. Staff may waive a fee once per member and year, for a reason \
that they write down; illness, a burst pipe and a closed branch have all been accepted.

Reservations. A reserved item waits at the front desk for eight days, under the first three letters of the member's \
name and the last two digits of the card. The member is told by letter or by message, as they chose. If nobody comes, \
the item goes to the next in the list. There is no charge for a reservation, but there may be no more than fifteen \
on a card.

Printing and machines. Printing costs eight cents a page, twenty in colour. The scanner by the window is free. Members \
may use a computer for two hours a day; the rooms on the second floor can be booked for groups of up to eight people, \
at most a week ahead and for at most three hours. Food stays in the hall. Water in a closed bottle is allowed \
everywhere but in the archive room. Telephones are switched to silent, and calls are taken on the stairs.

Safety. In case of fire the alarm is raised at the nearest red box, the lifts are not used, and everyone gathers at \
the anchor on the quay. The wardens wear yellow vests; there are two on each floor, named on the board by the lift. \
First aid boxes hang in the hall, in the workshop and in the archive room. A defibrillator is in the hall, left of \
the main door. Every accident, however small, is written into the blue book on the same day.

Lost property. What is found in the rooms is kept at the porter's lodge for three months and then given to the \
charity shop in Mill Street. Identity papers go to the police on the same evening. Umbrellas are kept for a year, \
since experience shows that their owners come back with the rain.

Donations. Gifts of books are welcome from the first to the tenth of each month, no more than two boxes at a time. \
The library decides what it keeps; the rest is sold at the autumn sale, and the money goes to the children's room. \
Encyclopaedias, and anything that smells of cellar, are declined with thanks."""
