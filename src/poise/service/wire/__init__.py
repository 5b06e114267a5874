"""Typed JSON that crosses a process boundary: what clients send, what the server answers. One definition for both sides."""
