"""Words of a text, entries of lists, and what words are worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from wpr.rewards.words import Entry, WordListError, WordTable, find_words, inflections, read_entries


def words(text: str) -> list[str]:
    return [word.group() for word in find_words(text)]


def table(*lines: str) -> WordTable:
    return WordTable(read_entries(lines))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, well-known cat's!", ["Don't", "stop", "well", "known", "cat's"]),
        ("the dogs' naïve Straße_2 'quoted'", ["the", "dogs", "naïve", "Straße", "2", "quoted"]),
        ("it\u2019s", ["it\u2019s"]),
        ("Привет, мир", ["Привет", "мир"]),
        ("你好 hello 世界", ["hello"]),
        ("किताब और ভালো كِتاب", ["किताब", "और", "ভালো", "كِتاب"]),
        ("cafe\u0301s คนดี \u0301", ["cafe\u0301s"]),
        ("สวัสดี こんにちは ... 😀", []),
        ("", []),
    ],
)
def test_words_of_a_text(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("word", "forms"),
    [
        ("walk", "walks walked walking"),
        ("hop", "hops hopped hopping"),
        ("hope", "hopes hoped hoping"),
        ("cry", "cries cried crying"),
        ("play", "plays played playing"),
        ("box", "boxes boxed boxing"),
        ("discus", "discuses discused discusing discussed discussing"),
        ("tie", "ties tied tying"),
        ("agree", "agrees agreed agreeing"),
        ("quit", "quits quitted quitting"),
        ("visit", "visits visited visiting visitted visitting"),
        ("the", ""),
        ("be", ""),
        ("naïve", ""),
    ],
)
def test_regular_forms(word: str, forms: str) -> None:
    assert inflections(word) == {word, *forms.split()}


def test_a_file_of_entries(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text(
        '\ufeff# a comment\nwalk\n\n"Ran"\t2.5  # exactly\nhappi* = 3\nin order to\nwell-known=0.5\n', "utf-8"
    )
    assert read_entries(path) == [
        Entry(("walk",), "inflected", 1.0, f"{path}:2"),
        Entry(("ran",), "exact", 2.5, f"{path}:4"),
        Entry(("happi",), "prefix", 3.0, f"{path}:5"),
        Entry(("in", "order", "to"), "inflected", 1.0, f"{path}:6"),
        Entry(("well", "known"), "inflected", 0.5, f"{path}:7"),
    ]
    assert [entry.text for entry in read_entries(path)] == ["walk", '"ran"', "happi*", "in order to", "well known"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "words.txt is empty; write one word per line"),
        (b"# only\n\n   # comments\n", "words.txt is empty"),
        (b"walk\n...\n", "words.txt:2: '...' has no letter"),
        (b"walk\n42\n", "words.txt:2: '42' has no letter"),
        (b"walk = -1\n", "words.txt:1: the weight '-1' must be a number above 0; words that are wanted"),
        (b"walk\tmuch\n", "words.txt:1: the weight 'much' must be a number above 0"),
        (b"walk = nan\n", "words.txt:1: the weight 'nan'"),
        (
            "walk\n你好\n".encode(),
            "words.txt:2: '你好' is in a script that is written without spaces between words [(]Han",
        ),
        ("ขอบคุณ\n".encode(), "written without spaces between words [(]Thai"),
        (b"walk (fast)\n", "words.txt:1: 'walk [(]fast[)]' is no word: '[(][)]' stands between words"),
        (b"walk\nwalk = 2\n", "words.txt:2: walk has the weight 2, and 1 at .*words.txt:1; keep one"),
        (b"caf\xe9\n", "words.txt is not UTF-8 text [(].*byte 3[)]; convert it"),
    ],
)
def test_bad_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(WordListError, match=message):
        WordTable(read_entries(path))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(WordListError, match="none.txt cannot be read: No such file"):
        read_entries(tmp_path / "none.txt")
    with pytest.raises(WordListError, match="cannot be read: Is a directory"):
        read_entries(tmp_path)
    with pytest.raises(WordListError, match="the list is empty"):
        read_entries([])


def test_the_entry_that_fits_best_counts_once() -> None:
    found = table("walk = 2", "walks = 5", "wal* = 7", "walki* = 8", '"go"', "CAN'T = 3")
    worths = {"walk": 2, "walks": 5, "walked": 2, "walking": 2, "wall": 7, "walkie": 8, "go": 1, "going": 0, "cat": 0}
    worths |= {"walk's": 2, "can't": 3, "go's": 0}
    assert {word: found.worth((word,)) for word in worths} == worths


def test_phrases_count_beside_their_words() -> None:
    found = table("order = 2", "in order to = 3", "as good a*")
    assert found.worth(("in", "order", "to")) == 3
    assert found.worth(("in", "order")) == 2
    assert found.worth(("order", "to")) == 0
    assert found.worth(("as", "good", "anyone")) == 1
    assert found.worth(("as", "good", "one")) == 0
    assert found.reach == 3


def test_entries_are_found_in_a_text_with_their_places() -> None:
    found = table("order = 2", "in order to = 3", "walk", "wal*")
    places = [
        (entry.text, first, last) for entry, first, last in found.find("He walked, in Order to wal; in, order to.")
    ]
    assert places == [
        ("walk", 1, 2), ("order", 3, 4), ("in order to", 2, 5), ("wal*", 5, 6), ("order", 7, 8),
    ]  # fmt: skip
    assert found.find("") == []
