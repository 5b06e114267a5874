"""One module a format. Each says in its docstring what becomes of every column; `registry.py` is the list of them."""
