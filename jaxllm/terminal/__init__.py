"""Commands for a person at a terminal: chat, complete, collect-env. They know models as things that answer."""
