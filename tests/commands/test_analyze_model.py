"""`wpr analyze` on a bare model, without a run."""

from __future__ import annotations

from pathlib import Path

from tests.analysis.substitution_texts import STORIES
from tests.pipeline.command import Here
from wpr import pico
from wpr.findings import load


def test_geometry_of_a_bare_model(here: Here, tmp_path: Path) -> None:
    finished = here.succeeds("analyze", "geometry", str(pico.path()), "--lam", "100", "--metric", "cosine",
                             "--text", "Once upon a time, there was a", "-o", str(tmp_path / "x"))  # fmt: skip
    finding = load(tmp_path / "x")
    (row,) = (dict(zip(finding.columns, row, strict=True)) for row in finding.rows)
    assert (row["setting"], row["metric"], row["lam"]) == ("paper:lam=100.0,metric=cosine", "cosine", 100.0)
    assert row["verdict"] in ("blind", "partly blind", "sees meaning")
    assert str(row["verdict"]).upper() in finished.stdout
    assert "nothing is written" in here.succeeds("analyze", "geometry", str(pico.path()), "-s", "semantic").stdout


def test_substitution_of_a_bare_model(here: Here, tmp_path: Path) -> None:
    """And what an encoder says of a setting's distances."""
    texts = tmp_path / "stories.txt"
    texts.write_text("\n".join(STORIES))
    judges = ["--texts", str(texts), "-e", str(pico.path())]
    finished = here.succeeds("analyze", "substitution", str(pico.path()), *judges, "--positions", "4",
                             "-r", "reverse-kl + 4*semantic", "-o", str(tmp_path / "x"))  # fmt: skip
    assert "in similarity (" in finished.stdout
    finding = load(tmp_path / "x")
    assert [row[0] for row in finding.rows] == ["reverse-kl", "reverse-kl + 4*semantic"]
    assert len(list((tmp_path / "x").glob("*.svg"))) == 2
    finished = here.succeeds("analyze", "geometry", str(pico.path()), *judges, "-s", "semantic")
    assert "beyond what the model's odds explain, by" in finished.stdout
