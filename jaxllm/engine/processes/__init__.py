"""One engine over several processes: how they meet, what they send each other, and what ends them all."""
