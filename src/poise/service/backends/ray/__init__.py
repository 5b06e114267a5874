"""Nodes of a Ray cluster as nodes of a remote back end. Start reading at `backend.py`; only `driver.py` imports Ray."""
