"""Atomic files and locks. Anyone may use them; they import only errors."""
