"""TRL's GRPO on wpr-pico, under reverse KL and transport: `python examples/grpo.py`. Minutes on a laptop, nothing to
download; needs `pip install 'wpr[train]'`.
"""

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig

from wpr import pico
from wpr.trl import GRPOTrainer  # instead of: from trl import GRPOTrainer

HEROES = ["a little cat", "a boy named Tim", "an old bear", "a girl named Lily", "a small red car", "two birds"]
PROMPTS = [{"prompt": f"Once upon a time there was {hero}"} for hero in HEROES]
GLAD = {"happy", "smiled", "laughed", "fun", "loved", "friends", "played", "hugged"}


def glad_words(completions, **columns):
    """A reward: how many glad words a story has."""
    return [float(sum(word.strip('.,!?"').lower() in GLAD for word in story.split())) for story in completions]


def main():
    model = str(pico.path())
    args = GRPOConfig(
        "runs/grpo-example",
        beta=0.0,  # TRL's own KL, an estimate from the drawn tokens; the regularizer is below
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=48,
        max_steps=30,
        learning_rate=2e-4,
        logging_steps=5,
        bf16=False,  # TRL's default, which a CPU may not have
        report_to="none",
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model,
        glad_words,
        args,
        train_dataset=Dataset.from_list(PROMPTS),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        regularizer="reverse-kl + 4*semantic",
        regularizer_beta=0.05,
    )
    trainer.train()
    for row in trainer.state.log_history:
        if "reward" in row:
            print(f"step {row['step']:3}: reward {row['reward']:.2f}, divergence {row['regularizer/divergence']:.4f}")


if __name__ == "__main__":
    main()
