"""Products of few rows with what stands beside them in a layer: the norm before, the gate or the residual after."""
