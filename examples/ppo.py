"""PPO on SmolLM2 with LoRA, under reverse KL and transport: `make ppo-example`. Minutes on a laptop."""

from pathlib import Path

from peft import LoraConfig

from wpr import PPOConfig, PPOTrainer

MODEL = Path(__file__).parent.parent / "models" / "smollm2"
THINGS = ["the sea", "a lost key", "bread", "winter", "an old train", "music", "a garden", "the moon"]
PROMPTS = [{"prompt": [{"role": "user", "content": f"Tell me about {thing}."}]} for thing in THINGS]


def short_words(prompts, responses, **columns):
    """A reward: short words, on average."""
    return [-sum(map(len, response.split())) / max(1, len(response.split())) for response in responses]


def main():
    args = PPOConfig(
        "runs/ppo-example",
        per_device_train_batch_size=8,
        max_new_tokens=32,
        max_steps=10,
        learning_rate=2e-4,
        beta=0.05,
        share_backbone=True,  # a value head on the policy, instead of critic="path/to/reward-model"
        save_strategy="no",
    )
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = PPOTrainer(
        str(MODEL),
        args,
        reward=short_words,
        regularizer="reverse-kl + 4*semantic",
        train_dataset=PROMPTS,
        peft_config=lora,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
