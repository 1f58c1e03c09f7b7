"""What happened to a model: data, text, and the journal of this process."""
