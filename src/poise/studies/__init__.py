"""What is studied: a trace or a journal, as records, with what there is to say of where they came from."""
