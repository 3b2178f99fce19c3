"""Answers that stand on measure and explain together."""
