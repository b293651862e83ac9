"""The King James Bible as chapters, read from Debian's `bible-kjv-text`, and its fixed split.

The translation dates from 1611 and its copyright has expired (the package's `copyright` file says so); in the United
Kingdom the Crown holds a perpetual printing patent, elsewhere the text is in the public domain.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BOS, EOS = "[BOS]", "[|endofturn|]"
USER, ASSISTANT = "[|user|]\n", "[|assistant|]\n"

# Neither set repeats a passage found elsewhere (no synoptic parallels, no Kings against Chronicles), so that a low
# loss on them is not recall. `validation` chooses the checkpoint; `heldout` chooses nothing.
HELDOUT = ("Ruth 2", "Job 28", "Psalm 104", "John 9", "Acts 27")
VALIDATION = ("1 Samuel 25", "Psalm 73", "Ecclesiastes 3", "Luke 15", "Ephesians 4", "Jonah 4")

_BOOKS = (
    "Ge=Genesis Exo=Exodus Lev=Leviticus Num=Numbers Deu=Deuteronomy Josh=Joshua Jdgs=Judges Ruth=Ruth 1Sm=1_Samuel "
    "2Sm=2_Samuel 1Ki=1_Kings 2Ki=2_Kings 1Chr=1_Chronicles 2Chr=2_Chronicles Ezra=Ezra Neh=Nehemiah Est=Esther Job=Job "
    "Psa=Psalm Prv=Proverbs Eccl=Ecclesiastes SSol=Song_of_Solomon Isa=Isaiah Jer=Jeremiah Lam=Lamentations Eze=Ezekiel "
    "Dan=Daniel Hos=Hosea Joel=Joel Amos=Amos Obad=Obadiah Jonah=Jonah Mic=Micah Nahum=Nahum Hab=Habakkuk Zep=Zephaniah "
    "Hag=Haggai Zec=Zechariah Mal=Malachi Mat=Matthew Mark=Mark Luke=Luke John=John Acts=Acts Rom=Romans "
    "1Cor=1_Corinthians 2Cor=2_Corinthians Gal=Galatians Eph=Ephesians Phi=Philippians Col=Colossians "
    "1Th=1_Thessalonians 2Th=2_Thessalonians 1Tim=1_Timothy 2Tim=2_Timothy Titus=Titus Phmn=Philemon Heb=Hebrews "
    "Jas=James 1Pet=1_Peter 2Pet=2_Peter 1Jn=1_John 2Jn=2_John 3Jn=3_John Jude=Jude Rev=Revelation"
)
BOOKS = {short: name.replace("_", " ") for short, name in (pair.split("=") for pair in _BOOKS.split())}
_VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.+)$")


@dataclass(frozen=True)
class Chapter:
    """One chapter: its name ("Genesis 1") and its verses, in order."""

    name: str
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        """The chapter's name and its verses, one a line."""
        return "\n".join((self.name, *self.verses))


def read_raw(path: Path | None = None) -> str:
    """The whole Bible, one `Book1:1 text` a line: from a file, or else from the `bible` command.

    Raises:
        ValueError: no file is given and the command is missing.
    """
    if path is not None:
        return path.read_text(encoding="ascii")
    if shutil.which("bible") is None:
        raise ValueError(
            "the command `bible` is missing: apt-get install bible-kjv bible-kjv-text, or pass --text FILE"
        )
    return subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True, text=True).stdout


def chapters(raw: str) -> list[Chapter]:
    """Split `read_raw`'s output into its 1,189 chapters.

    Raises:
        ValueError: a line is not a verse, or the count of chapters is wrong.
    """
    found: dict[str, list[str]] = {}
    for line in raw.splitlines():
        match = _VERSE.match(line.strip())
        if match is None or match[1] not in BOOKS:
            raise ValueError(f"not a verse: {line!r}")
        found.setdefault(f"{BOOKS[match[1]]} {match[2]}", []).append(" ".join(match[4].split()))
    if len(found) != 1189:
        raise ValueError(f"expected 1189 chapters, found {len(found)}")
    return [Chapter(name, tuple(verses)) for name, verses in found.items()]


def split(all_chapters: list[Chapter]) -> tuple[list[Chapter], list[Chapter], list[Chapter]]:
    """Training, validation and held-out chapters. Every chapter is in exactly one."""
    by_name = {chapter.name: chapter for chapter in all_chapters}
    aside = {*HELDOUT, *VALIDATION}
    train = [chapter for chapter in all_chapters if chapter.name not in aside]
    return train, [by_name[name] for name in VALIDATION], [by_name[name] for name in HELDOUT]


def joined(some: list[Chapter]) -> str:
    """Chapters with an empty line between them: the form of `heldout.txt`."""
    return "\n\n".join(chapter.text for chapter in some) + "\n"


def dialogue(chapter: Chapter, rng: random.Random) -> str:
    """A turn of chat: the user begins a verse, the assistant ends it and adds the next one or two."""
    start = rng.randrange(len(chapter.verses))
    words = chapter.verses[start].split(" ")
    cut = rng.randint(1, max(1, min(8, len(words) - 1)))
    answer = "\n".join((" ".join(words[cut:]), *chapter.verses[start + 1 : start + 1 + rng.randint(1, 2)])).strip()
    return f"{USER}{' '.join(words[:cut])}{EOS}\n{ASSISTANT}{answer}{EOS}\n"


def documents(train: list[Chapter], rng: random.Random, chat_share: float = 0.5) -> list[str]:
    """One epoch of training documents, shuffled.

    Runs of one to four neighbouring chapters, and as many dialogues as `chat_share` times the chapters (about 5 % of the
    tokens at 0.5).
    """
    found, at = [], 0
    while at < len(train):
        run = rng.randint(1, 4)
        found.append(f"{BOS}{joined(train[at : at + run])}{EOS}")
        at += run
    found += [BOS + dialogue(rng.choice(train), rng) for _ in range(int(chat_share * len(train)))]
    rng.shuffle(found)
    return found
