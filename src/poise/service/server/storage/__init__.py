"""Everything that the service keeps on disk; begin with `store.py`."""
