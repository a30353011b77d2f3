"""From datasets and local files to token rows for SFT, the reward model and PPO."""

from wpr.data.corpus import Corpus, load_corpus
from wpr.data.encoder import Encoder
from wpr.data.rows import DataError, Message, Row
from wpr.data.settings import DataSettings, SplitSettings
from wpr.data.split import Split, split_corpus
from wpr.data.stages import LengthReport, ppo_rows, reward_rows, sft_rows

__all__ = [
    "Corpus",
    "DataError",
    "DataSettings",
    "Encoder",
    "LengthReport",
    "Message",
    "Row",
    "Split",
    "SplitSettings",
    "load_corpus",
    "ppo_rows",
    "reward_rows",
    "sft_rows",
    "split_corpus",
]
