"""Sums over tokens in one pass over the data, in Triton."""
