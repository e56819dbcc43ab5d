"""The cost model's constants of the device at hand, from steps that it runs. Knows no traffic."""
