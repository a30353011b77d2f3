"""The paper's tables and figures: which commands make each, what they need, and its numbers beside the paper's."""

from wpr.reproduce.mapping import Item, Mapping, find_items, load_mapping

__all__ = ["Item", "Mapping", "find_items", "load_mapping"]
