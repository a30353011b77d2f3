"""The screen and the forbidden words on real models: `wpr.analysis.screen` and `.substitution` say what is measured.

After `make smollm2 gemma3 minilm`, with a file of texts that is not part of the project, such as the test split of
HH-RLHF's helpful-base:

    python -m benchmarks.substitution --texts helpful-base-test.jsonl.gz                    all three models
    python -m benchmarks.substitution --texts ... --model models/smollm2 --positions 128

Measuring a vocabulary of 262,144 tokens takes half an hour on two cores and seconds on a GPU (`--device cuda`).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.registry_models import MODELS, load
from wpr import pico
from wpr.analysis.substitution import analyze_model
from wpr.analysis.word_positions import read_texts
from wpr.findings import as_text, save
from wpr.model_geometry import RegularizerFactory
from wpr.regularizers.spec import RECOMMENDED

REGULARIZERS = [
    "squared-hellinger",
    "unbalanced",
    "reverse-kl + 4*unbalanced",
    "semantic",
    RECOMMENDED,
]
GEOMETRIES = [
    "metric=cosine",
    "transform=centre",
    "transform=unit/centre/unit",
    "transform=centre/remove-8/unit",
    "transform=centre/unit/whiten-0.125",
    "transform=centre/whiten-0.5/unit",
    "transform=centre/whiten-1/unit",
]
OTHERS = {"smollm2": MODELS / "gemma3-270m"}
"""Another language model for each; SmolLM2 where none is named."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--model", type=Path, action="append", help="a model's folder; repeat for more")
    parser.add_argument("--encoder", type=Path, default=MODELS / "minilm")
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument(
        "--skip-texts", type=int, default=0, help="leave out so many texts, on which settings were chosen"
    )
    parser.add_argument("--contextual", action="store_true", help="screen contextual scores too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/substitution"))
    arguments = parser.parse_args()
    texts = read_texts(arguments.texts)[arguments.skip_texts :]
    for folder in arguments.model or [MODELS / "smollm2", Path(str(pico.path())), MODELS / "gemma3-270m"]:
        model, tokenizer = load(folder)
        model = model.to(arguments.device)
        other = OTHERS.get(folder.name, MODELS / "smollm2")
        finding, data = analyze_model(
            RegularizerFactory(model), model, tokenizer, texts, folder.name, str(arguments.encoder), REGULARIZERS,
            other=str(other), geometries=[*GEOMETRIES, f"embeddings={other},transform=centre/unit"],
            positions=arguments.positions, contextual=arguments.contextual, say=print,
        )  # fmt: skip
        save(finding, arguments.output / folder.name)
        lines = "".join(json.dumps(row, default=str) + "\n" for row in data)
        (arguments.output / folder.name / "data.jsonl").write_text(lines)
        print(as_text(finding))


if __name__ == "__main__":
    main()
