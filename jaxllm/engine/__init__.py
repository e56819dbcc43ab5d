"""The engine: scheduler, step inputs, jitted step, row state. Knows token ids; no text and no HTTP."""
