"""The library for studies: what `import poise` offers besides the client."""
