"""One file a policy; `catalogue.py` is the table of contents."""
