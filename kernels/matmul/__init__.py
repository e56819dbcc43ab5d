"""Products of a step's rows with a weight matrix of one layer."""
