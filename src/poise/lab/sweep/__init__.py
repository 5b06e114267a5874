"""Sweeps: policies × loads × seeds, cell by cell, and the file that keeps finished cells."""
