"""The library for studies: what `import poise` offers besides the client of a service.

`runs` has `simulate`, `compare` and `sweep`, `results` what they return, `values` traces and clusters, `plots` the figures.
"""
