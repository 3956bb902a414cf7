"""Packing trees of files."""
