"""What is studied: a trace or a journal, as records."""
