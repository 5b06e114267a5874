"""The HTTP edge of the service: socket and connections, the guard, and the API."""
