"""One small file per model family: what differs, and the names of its weights."""
