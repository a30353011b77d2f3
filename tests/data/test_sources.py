"""Local paths, folders and patterns; the hub's cache without a network; and a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.data import files
from wpr.data import DataError, DataSettings
from wpr.data.sources import find_files

ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def found(**settings: Any) -> tuple[list[str], list[str]]:
    files_found = find_files(DataSettings(**{"format": "preference", **settings}))
    return [Path(name).name for _, name in files_found.train], [Path(name).name for _, name in files_found.validation]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl.gz", "test.jsonl", "deep/c.parquet", ".hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "README.md").write_text("x")
    return tmp_path


def test_files_patterns_and_folders(folder: Path) -> None:
    assert found(source=str(folder / "b.jsonl")) == (["b.jsonl"], [])
    assert found(source=[str(folder / "b.jsonl"), str(folder / "*.jsonl*")])[0] == [
        "b.jsonl",
        "a.jsonl.gz",
        "test.jsonl",
    ]
    assert found(source=str(folder), files=["*.parquet"]) == (["c.parquet"], [])
    assert found(source=str(folder), files=["[ab].*"], validation_files=["test*"]) == (
        ["a.jsonl.gz", "b.jsonl"],
        ["test.jsonl"],
    )
    assert found(source=str(folder / "b.jsonl"), validation=str(folder / "deep")) == (["b.jsonl"], ["c.parquet"])
    assert found(source=str(folder / "deep")) == (["c.parquet"], [])


def test_a_folder_laid_out_as_the_dataset_is_on_the_hub(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("x")
    assert found(format="apps", source=str(tmp_path)) == (["train.jsonl"], ["test.jsonl"])
    assert found(format="apps", source=str(tmp_path), validation_files=[]) == (["train.jsonl"], [])
    assert found(format="apps", source=str(tmp_path), files=["train.jsonl"]) == (["train.jsonl"], [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "{}/gone.jsonl"}, "there is no file"),
        ({"source": "{}/gone*.jsonl"}, "no file matches"),
        ({"source": "nonsense"}, "not the name of a hub dataset (OWNER/NAME)"),
        ({"source": "{}"}, "set data.files to patterns of the training files"),
        ({"source": "{}", "files": ["x*"]}, "no file that matches 'x*'; it has a.jsonl.gz, b.jsonl, deep/c.parquet"),
        ({"source": "{}", "files": ["b*"], "validation_files": ["x*"]}, "data.validation_files: "),
        ({"source": "{}/b.jsonl", "files": ["b*"]}, "names files; leave them out"),
        ({"source": "{}/b.jsonl", "validation": "{}"}, "data.validation: the folder"),
        ({"source": "{}/b.jsonl", "validation": "{}/*.jsonl"}, "both a training and a validation file"),
        ({"format": "prompts"}, "data.format prompts has no dataset of its own"),
        ({"format": "prompts", "source": "owner/name"}, "set data.files, for instance"),
    ],
)
def test_what_cannot_be_found(folder: Path, settings: dict[str, Any], message: str) -> None:
    filled = {
        name: value.replace("{}", str(folder)) if isinstance(value, str) else value for name, value in settings.items()
    }
    with pytest.raises(DataError) as caught:
        found(**filled)
    assert message in str(caught.value)


def run(home: Path, *sources: dict[str, Any], offline: bool | None = None, **environment: str) -> list[str]:
    """Load in a process of its own (the hub's library reads its environment once); a line for what came of each."""
    code = (
        "import json, sys\n"
        "from wpr.data import DataError, DataSettings, load_corpus\n"
        "for settings in json.loads(sys.argv[1]):\n"
        f"    try:\n        corpus = load_corpus(DataSettings(**settings), offline={offline})\n"
        "    except DataError as error:\n        print('DataError:', error)\n"
        "    else:\n        print(len(corpus.rows), len(corpus.validation), corpus.rows[0].origin)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    clean |= {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sources)], env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def warm(home: Path) -> None:
    """A cache as the hub's library leaves it."""
    cache = home / "hub" / "datasets--openai--summarize_from_feedback"
    (cache / "refs" / "refs" / "convert").mkdir(parents=True)
    (cache / "refs" / "refs" / "convert" / "parquet").write_text(COMMIT)
    snapshot = cache / "snapshots" / COMMIT / "comparisons"
    files.parquet(snapshot / "train" / "0000.parquet", [files.TLDR] * 3)
    files.parquet(snapshot / "validation" / "0000.parquet", [files.TLDR, files.NEWS])


@pytest.mark.parametrize(("offline", "environment"), [(True, {}), (None, {"HF_HUB_OFFLINE": "1"})])
def test_a_warm_cache_needs_no_network(tmp_path: Path, offline: bool | None, environment: dict[str, str]) -> None:
    warm(tmp_path)
    environment = {"HF_ENDPOINT": "http://127.0.0.1:1", **environment}
    origin = "openai/summarize_from_feedback/comparisons/train/0000.parquet:1"
    assert run(tmp_path, {"format": "tldr"}, offline=offline, **environment) == [f"3 1 {origin}"]


def test_a_cold_cache_says_what_to_do(tmp_path: Path) -> None:
    other = {"format": "prompts", "source": "some/thing", "files": ["*.csv"]}
    own, named = run(tmp_path, {"format": "tldr"}, other, HF_HUB_OFFLINE="1")
    for part in (
        "DataError: the dataset openai/summarize_from_feedback is neither a local path nor in the cache",
        "`hf download openai/summarize_from_feedback --repo-type dataset --revision refs/convert/parquet "
        '--include "comparisons/train/*.parquet" --include "comparisons/validation/*.parquet"`',
        "or set data.source to a local file or folder",
    ):
        assert part in own
    assert 'hf download some/thing --repo-type dataset --include "*.csv"`' in named


@contextmanager
def hub(repository: str, contents: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """As much of the hub's web interface as a download needs: its address, and what was asked of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            api, raw = f"/api/datasets/{repository}", f"/datasets/{repository}/resolve/{COMMIT}/"
            kind = "application/json"
            if path.startswith(f"{api}/revision/") or path == api:
                siblings = [{"rfilename": name} for name in contents]
                content = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
            elif path.startswith(f"{api}/tree/"):
                content = json.dumps(
                    [
                        {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}
                        for name, data in contents.items()
                    ]
                ).encode()
            elif path.startswith(raw) and path.removeprefix(raw) in contents:
                content, kind = contents[path.removeprefix(raw)], "application/octet-stream"
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_from_the_hub_once_then_from_the_cache(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in [files.APPS, {**files.APPS, "problem_id": 8}]).encode()
    contents = {"train.jsonl": lines, "test.jsonl": lines + lines, "apps.py": b"raise SystemExit", "big.bin": b"x"}
    expected = "2 4 codeparrot/apps/train.jsonl:1"
    with hub("codeparrot/apps", contents) as (address, asked):
        own, missing, other = run(
            tmp_path,
            {"format": "apps"},
            {"format": "hh", "source": "no/such"},
            {"format": "apps", "files": ["*.parquet"]},
            HF_ENDPOINT=address,
        )
        assert own == expected
        assert {path.rpartition("/")[2] for path in asked if "/resolve/" in path} == {"train.jsonl", "test.jsonl"}
        assert "the dataset no/such is neither a local path" in missing
        assert "no file matches '*.parquet'" in other
        asked.clear()
        assert run(tmp_path, {"format": "apps"}, offline=True, HF_ENDPOINT=address) == [expected]
        assert asked == []
    # The hub is gone now.
    assert run(tmp_path, {"format": "apps"}, HF_ENDPOINT=address) == [expected]
