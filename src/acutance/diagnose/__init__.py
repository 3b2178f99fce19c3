"""Answers that stand on measure and explain together: how well a model works, and how two of them differ."""
