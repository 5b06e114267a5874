"""Worlds that the core can run in. They do not import each other."""
