"""The model card of a stage's model: where it came from, how it was made, what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wpr.config.recipe import Recipe
from wpr.config.yaml_file import to_yaml
from wpr.pipeline.environment import versions

TITLES = {
    "sft": "supervised fine-tuning",
    "reward": "reward model",
    "ppo": "PPO with a policy regularizer",
    "grpo": "GRPO with a policy regularizer",
    "rloo": "RLOO with a policy regularizer",
}


def model_card(recipe: Recipe, stage: str, results: dict[str, Any]) -> str:
    """Markdown with the metadata block that the hub reads."""
    kind = recipe.trainer if stage.startswith("ppo/") else stage
    front: dict[str, Any] = {} if Path(recipe.model.name).exists() else {"base_model": recipe.model.name}
    front |= {
        "library_name": "transformers",
        "tags": ["wpr", kind],
        "pipeline_tag": "text-classification" if kind == "reward" else "text-generation",
    }
    measured = {name: value for name, value in results.items() if name != "train"}  # that is in the metrics file
    numbers = "\n".join(f"| {name} | {_shown(value)} |" for name, value in flatten(measured).items())
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"---\n{to_yaml(front)}---\n\n# {recipe.name}: {stage}\n\n"
        f"Made from {recipe.model.name} by {TITLES[kind]}"
        f"{' (' + recipe.description + ')' if recipe.description else ''}.\n\n"
        "## Results\n\nBefore and after are on held-out data.\n\n"
        f"| measure | value |\n|---|---|\n{numbers}\n\n"
        f"## Recipe\n\n```yaml\n{to_yaml(recipe.as_dict())}```\n\n## Versions\n\n{packages}\n"
    )


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested results with dotted names; lists, which belong in files, are left out."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value, dict):
            flat |= flatten(value, key)
        elif not isinstance(value, list):
            flat[key] = value
    return flat


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
